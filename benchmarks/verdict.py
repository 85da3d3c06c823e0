"""Check a figure against its target and print the result beside it."""


def verdict(what: str, value: float, bound: float, *, at_least: bool = False) -> None:
    held = value >= bound if at_least else value <= bound
    print(f"  {what}: {value:,.2f}, must be at {'least' if at_least else 'most'} {bound:,}: {'yes' if held else 'NO'}")
