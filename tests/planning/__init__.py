"""Does the doctor find what is wrong?"""
