"""What one rank holds: parameters in groups, their buffers, what the optimizer owns of them."""
