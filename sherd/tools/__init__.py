"""Tools on top of the library, which knows none of them: plans, simulations, reports, conversions, checks."""
