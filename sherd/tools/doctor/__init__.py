"""`sherd doctor`: what this machine and its ranks are like, what is wrong with them, and what to do about it."""
