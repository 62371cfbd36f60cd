"""What users call: the two front ends."""
