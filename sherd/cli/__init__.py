"""The command `sherd`: its words, and what each of them does."""
