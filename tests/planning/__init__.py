"""Plans, predictions and reports."""
