"""Does sharded training equal plain training in one process?"""
