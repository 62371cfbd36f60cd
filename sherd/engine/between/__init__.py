"""Outside of a step: unsharded copies for the user, and loading."""
