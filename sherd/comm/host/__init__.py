"""Transports for CPU hosts: gloo without staging copies, and memory that ranks of one host share."""
