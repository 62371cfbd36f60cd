"""`sherd plan`: what a training takes and which settings it should have, said before it runs."""
