"""WHAT IS KEPT: the state of optimizers, by the names of parameters, whole or in parts."""
