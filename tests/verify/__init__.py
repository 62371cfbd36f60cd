"""Does verify_equivalence find the first wrong tensor, and nothing where nothing is wrong?"""
