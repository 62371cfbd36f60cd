"""What tests share, one word for one idea; look here before you write a helper, a model or a loop of your own.

models/         tiny models: `build("tied_across")` is one difficulty with its inputs, loss and units; `Net`, `chain`;
                `Wired`, of parts and a function
sharding.py     `sharded(model, "flat")`: each front end and placement, and what the units are
training.py     `Recipe` and `Run` for specimens; `train_job` and `assert_trained` for any model and job
comparing.py    `whole(value)`, `whole_params(model)`, `assert_same(found, expected)`, `assert_refused(action, ...)`
refusals.py     `assert words in refusal(InputError, action, ...), row`
gathered.py     many sharded tensors whole at once
checkpoints.py  `save` and `load` a model and its optimizer by torch's distributed checkpointing
meshes.py       `mesh_of((2, 2))`
sockets.py      the sockets of this process, and what has come through them
ranks/          `world(n)`: processes; `threads(n)`: threads; `@on_threads(n)`, `@on_processes(n)`: a test's body;
                `ranks.forked`: programs without an import of torch
suites.py       which cases a run takes: marks and shares
"""
