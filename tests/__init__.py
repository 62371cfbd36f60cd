"""The tests: a package, so that a rank's process imports a test's functions by the name pytest gave them."""
