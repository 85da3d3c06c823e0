"""The paper's tables: what a cell runs, its result, and the tables made of them."""
