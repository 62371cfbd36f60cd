"""torchao's weights are sharded as they are: NF4 in 4 bits; those that train in few bits, sent in few bits."""

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import PlacementError
from tests.support.comparing import assert_same

nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
quantization = pytest.importorskip("torchao.quantization")

WIDTH, RANK, BLOCK, SCALES = 64, 4, 64, 16


class Adapted(nn.Module):
    """A frozen matrix in NF4, and a trained adapter beside it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.base = nn.Linear(width, WIDTH, bias=False)
        weight = nf4.to_nf4(self.base.weight.detach(), BLOCK, SCALES)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def made():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.Linear(WIDTH, 3))


def trained(model):
    """Outputs before training, and losses."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, losses = model(x), []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return before, torch.tensor(losses)


def refused():
    """Rows that do not divide, and blocks of scales that do not."""
    for rows, columns, scales in ((33, 64, 33), (64, 16, 64)):
        layer = nn.Linear(columns, rows, bias=False)
        layer.weight = nn.Parameter(nf4.to_nf4(torch.randn(rows, columns), 16, scales), requires_grad=False)
        with pytest.raises(PlacementError, match=rf"weight: a NF4Tensor of shape \({rows}, .* over 2 ranks"):
            sherd.fully_shard(layer)
    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Float8WeightOnlyConfig(),
    ):  # no function gathers them
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
        quantization.quantize_(model, config)
        with pytest.raises(PlacementError, match=r"0\.weight is sparse, nested or quantized"):
            sherd.fully_shard(model)


def test_a_weight_whose_blocks_do_not_divide_or_that_nothing_gathers_is_refused_on_all_ranks(world):
    world(2).run(refused)


def on_a_rank(**options):
    model = made()
    for layer in (model[0], model[2]):
        sherd.fully_shard(layer, **options)
    sherd.fully_shard(model, **options)
    found = trained(model)
    report = sherd.memory_report(model)
    shards = {row.unit: (row.now, row.at_peak) for row in report.rows if row.kind == "shards"}
    local = model[0].base.weight.to_local()
    assert isinstance(local, nf4.NF4Tensor)
    return found, shards["0"], local.quantized_data.nbytes


@pytest.mark.values
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_with_nf4_weights_trains_as_in_one_process_and_shows_their_bytes(num_ranks, options, world):
    expected = trained(made())
    for found, (now, at_peak), nbytes in world(num_ranks).run(on_a_rank, **options):
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1], rtol=1e-5, atol=1e-6)
        assert nbytes == WIDTH * WIDTH // 2 // num_ranks
        assert nbytes < now == at_peak < 3 * nbytes  # with scales, and the adapter's shards


def in_few_bits(kind):
    """A model whose weights say what is gathered: float8 with one scale, ternary numbers, int8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
    if kind == "float8":
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        float8.convert_to_float8_training(model, config=config)
    elif kind == "mxfp8":
        mxfp8 = pytest.importorskip("torchao.prototype.moe_training.tensor")
        kernels = pytest.importorskip("torchao.quantization.quantize_.common").KernelPreference
        emulated = mxfp8.MXFP8TrainingOpConfig(kernel_preference=kernels.EMULATED)
        model.to(torch.bfloat16)
        for layer in (model[0], model[2]):
            weight = mxfp8.MXFP8TrainingWeightWrapperTensor(layer.weight.detach(), emulated)
            layer.weight, layer.bias = nn.Parameter(weight), None
    else:
        training = pytest.importorskip("torchao.prototype.quantized_training")
        quantization.quantize_(model, getattr(training, kind)())
    return model


def steps_in_few_bits(kind, is_sharded):
    """Losses of four steps, all ranks on one batch. A weight's scale changes with each step."""
    with torch.compiler.set_stance("force_eager"):
        model = in_few_bits(kind)
        precision = sherd.MixedPrecisionPolicy(torch.bfloat16 if kind == "mxfp8" else None)
        for layer in (model[0], model[2], model) if is_sharded else ():
            sherd.fully_shard(layer, mp_policy=precision)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)).to(model[0].weight.dtype)
        for _ in range(4):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


KINDS = ("float8", "mxfp8", "bitnet_training", "int8_mixed_precision_training")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.values
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_weights_that_train_in_few_bits_train_as_in_one_process(num_ranks, kind, world):
    expected = steps_in_few_bits(kind, False)
    # A number that is rounded otherwise on one rank may be another of few bits.
    close = {"rtol": 1e-3, "atol": 0} if num_ranks > 1 else {"rtol": 0, "atol": 0}
    for found in world(num_ranks).run(steps_in_few_bits, kind, True):
        assert_same(found, expected, **close)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_weights_in_int8_are_trained_though_they_have_no_norm(world):
    kind = "int8_weight_only_quantized_training"
    expected = steps_in_few_bits(kind, False)
    for found in world(2).run(steps_in_few_bits, kind, True):
        assert_same(found, expected, rtol=2e-2, atol=0)  # rounded at random, by each rank's generator


# NVFP4: torchao's training keeps plain weights, which its products quantize. Those need triton, and torch multiplies in
# FP4 on GPUs of compute capability 10 alone. On a CPU its tensors can be tried, as a weight that sends them.


def in_nvfp4(rows):
    """A weight that is gathered as torchao's NVFP4Tensor: 4 bits an element, a scale in float8 for each 16 in a row."""
    tensors = pytest.importorskip("torchao.prototype.moe_training.tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor

    class Quantized(tensors.TrainingWeightWrapperBaseTensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                if function is nn.functional.linear and not hasattr(args[1], "device_mesh"):
                    weight = args[1]._data
                    if args[1].config == "exact":
                        weight = nvfp4.to_nvfp4(weight).dequantize()
                    return Product.apply(args[0], args[1], weight)
                return function(*args, **(kwargs or {}))

        def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
            sent = nvfp4.to_nvfp4(self._data)
            return (sent.qdata.view(torch.uint8), sent.scale.view(torch.uint8)), self.dtype

        def fsdp_post_all_gather(self, gathered, dtype, param_dtype, *, out=None):
            codes, scales = gathered
            values = nvfp4(codes, scales.view(torch.float8_e4m3fn), 16, dtype).dequantize()
            if out is None:
                return Quantized(values, "rounded"), (values,)
            with torch.autograd._unsafe_preserve_version_counter(out._data):  # as torchao's own do
                out._data.copy_(values)
            return None

    return nn.Parameter(Quantized(rows, "exact"))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, values):
        ctx.save_for_backward(x, values)
        return x @ values.t()

    @staticmethod
    def backward(ctx, grad):
        x, values = ctx.saved_tensors
        return grad @ values, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def steps_in_nvfp4(shard, rows=WIDTH):
    """Outputs of two steps. The weights are quantized before they travel, or in the product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, rows, bias=False), nn.GELU(), nn.Linear(rows, WIDTH, bias=False))
    for layer in (model[0], model[2]):
        layer.weight = in_nvfp4(layer.weight.detach())
    for layer in (model[0], model[2], model) if shard is not None else ():
        shard(layer)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        y = model(x)
        found.append(y.detach().clone())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def by_torch_in_nvfp4():
    from torch.distributed.fsdp import fully_shard

    return steps_in_nvfp4(fully_shard)


def by_sherd_in_nvfp4(rows):
    return steps_in_nvfp4(sherd.fully_shard, rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_is_quantized_to_nvfp4_and_then_gathered_is_what_is_gathered_and_then_quantized(world):
    for num_ranks, rows in ((2, WIDTH), (3, 80)):
        expected = steps_in_nvfp4(None, rows)
        for found in world(num_ranks).run(by_sherd_in_nvfp4, rows):
            assert torch.equal(found[0], expected[0]), (num_ranks, rows)
            assert_same(found[1], expected[1], rtol=2e-2, atol=2e-2)  # another mean of gradients may round otherwise
    expected = steps_in_nvfp4(None)
    for found in world(2).run(by_torch_in_nvfp4):
        assert torch.equal(found[0], expected[0])


def nvfp4_linears():
    """The losses of torchao's own linears, or what they raise; the weights afterwards."""
    training = pytest.importorskip("torchao.prototype.moe_training.nvfp4_training.nvfp4_training")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).bfloat16()
    before = [each.detach().clone() for each in model.parameters()]
    quantization.quantize_(model, training.NVFP4TrainingConfig(rht_sign_vector=(1, -1) * 8))
    for layer in (*model, model):
        sherd.fully_shard(layer)
    with pytest.raises(NotImplementedError, match="triton"):
        model(torch.ones(128, 128, dtype=torch.bfloat16)).sum().backward()
    assert all(torch.equal(now.full_tensor(), then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a CPU refuses")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_linears_of_nvfp4_training_have_plain_shards_and_only_their_product_needs_triton(world):
    world(2).run(nvfp4_linears)
