"""Optimizers and their steps over shards: flat ones, element by element, and those of whole matrices.

flat.py            `flatten_optimizer`: an element-wise optimizer steps spans of the shard buffers
matrix.py          `MatrixOptimizer`: a function of whole matrices
muon.py            `Muon`, with AdamW for what is no hidden matrix
newton_schulz.py   the products
matrix_plan.py     which rank computes which matrix of a step, and what travels together
gradients.py       whole gradients, reduced to the ranks that compute; state that lies as they do
matrix_state.py    what a function keeps of whole matrices: where it lies
exchange.py        the way of matrices to their owners and back
owners.py          who owns what
under_way.py       steps that wait for what travels, beside a backward
faults.py          what goes wrong on one rank, told to all
torch_muon.py      steps of `torch.optim.Muon` over shards
"""

from sherd.optim.flat import NOT_ELEMENTWISE, FlatStep, flatten_optimizer
from sherd.tensor.optimizers import params_replaced

__all__ = ["NOT_ELEMENTWISE", "FlatStep", "flatten_optimizer", "params_replaced"]
