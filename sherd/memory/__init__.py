"""What memory a step takes, predicted and measured."""
