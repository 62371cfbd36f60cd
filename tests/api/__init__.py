"""Does every method, argument, misuse and odd use of `fully_shard` do what it says?"""
