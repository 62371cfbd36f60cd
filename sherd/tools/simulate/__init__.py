"""The simulator: the schedule that runs a model, played on a clock and a memory meter. No torch."""
