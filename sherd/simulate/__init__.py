"""What a training step takes: the schedule that runs a model, played on a clock and a memory meter. No torch."""
