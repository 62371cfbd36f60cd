"""Random programs: models drawn at random, trained under sherd and in one process, and compared."""
