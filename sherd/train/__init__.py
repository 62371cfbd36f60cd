"""What is `sherd train`? A reference trainer: one readable way from text to a sharded language model."""
