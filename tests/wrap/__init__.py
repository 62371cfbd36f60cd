"""Which modules become units, and do they train?"""
