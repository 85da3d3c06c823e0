"""The paper's tables: their cells, the results of our runs, and rendering."""
