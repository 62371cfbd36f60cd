"""Weights that have changed since they were last sent, as reinforcement learning sends them to inference engines.

`iter_full_parameters` asks the mark that it is given, and knows no other class of this room.
"""
