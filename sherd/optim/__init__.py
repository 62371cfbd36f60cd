"""Optimizers and their steps over shards: flat ones, element by element, and those of full matrices.

flat.py            `flatten_optimizer`: an element-wise optimizer steps spans of the shard buffers
matrix.py          `MatrixOptimizer`: a function of full matrices
muon.py            `Muon`, with AdamW for all other parameters
newton_schulz.py   the products
matrix_plan.py     which rank computes which matrix of a step, and what travels together
gradients.py       full gradients, reduced to the ranks that compute; state in the same layout
matrix_state.py    what a function keeps of full matrices: its owners and layout
exchange.py        the exchange of matrices with their owners
owners.py          who owns what
under_way.py       steps that wait for an exchange, while a backward goes on
faults.py          what goes wrong on one rank, reported to all
torch_muon.py      steps of `torch.optim.Muon` over shards
"""

from sherd.optim.flat import NOT_ELEMENTWISE, FlatStep, flatten_optimizer
from sherd.tensor.local_step import params_replaced

__all__ = ["NOT_ELEMENTWISE", "FlatStep", "flatten_optimizer", "params_replaced"]
