"""Tests of `sherd doctor`."""
