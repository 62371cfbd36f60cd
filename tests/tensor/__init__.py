"""Do tensors that are cut into runs behave as whole ones, wherever the cuts are?"""
