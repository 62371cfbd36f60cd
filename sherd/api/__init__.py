"""The functions and classes that users call: the two front ends."""
