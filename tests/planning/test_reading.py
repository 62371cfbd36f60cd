"""What is read from a model on the meta device is what a real step on the CPU then takes."""

import itertools
import threading
from functools import partial

import pytest
import torch
from torch import nn

from sherd.tools.plan.operations import kernels_of
from sherd.tools.plan.reading import own_or_usual_loss, read_work
from sherd.tools.simulate.work import (
    Allocate,
    BackwardBegins,
    Enter,
    Gradient,
    Leave,
    OpKind,
    Passed,
    Reached,
    Release,
    TensorKind,
    Use,
)
from sherd.train.config import InputError
from tests.planning import models
from tests.planning.played import (
    assert_calls_see_what_is_alive,
    flops,
    heights,
    made,
    measured,
    names,
    of_kind,
    ops,
    peak,
    read,
)
from tests.support.ranks.forked import answer_of
from tests.support.versions import torch_is_older


@pytest.mark.parametrize("name", models.ALL)
def test_memory_and_operations_are_those_of_a_real_step(name):
    build, loss = models.ALL[name]
    work = read(build, loss)
    assert (peak(work), flops(work)) == measured(build, loss)


@pytest.mark.parametrize("name", models.ALL)
def test_events_are_in_order(name):
    work = read(*models.ALL[name])
    assert_calls_see_what_is_alive(work)
    depth, gradients, is_forward = 0, [], True
    reached, passed = [], []
    for event in work.events:
        match event:
            case Enter(again=again) | Leave(again=again):
                assert again is not is_forward
                depth += 1 if isinstance(event, Enter) else -1
            case Use():
                assert is_forward or depth
            case BackwardBegins():
                assert not depth
                is_forward = False
            case Gradient(parameter):
                gradients.append(parameter)
            case Reached(module):
                parent = work.modules[module].parent
                assert parent is None or parent in reached or work.modules[parent].kind == "ModuleList"
                reached.append(module)
            case Passed(module):
                assert module in reached
                children = [at for at in reached if work.modules[at].parent == module]
                assert set(children) <= set(passed)
                passed.append(module)
    assert sorted(reached) == sorted(passed)
    assert sorted(gradients) == [at for at, each in enumerate(work.parameters) if each.is_trainable]


def test_a_module_is_passed_after_its_gradients_and_before_the_module_in_front_is_reached():
    work = read(models.decoder, models.next_token)
    first, second = (at for at, each in enumerate(work.modules) if each.name in ("blocks.0", "blocks.1"))
    last = max(at for at, each in enumerate(work.parameters) if each.name.startswith("blocks.1."))
    wanted = (Reached(second), Gradient(last), Passed(second), Reached(first), Passed(first))
    order = [work.events.index(each) for each in wanted]
    assert order == sorted(order)


def test_each_use_of_a_tied_weight_is_told_and_its_gradient_once():
    work = read(models.tied_decoder, models.next_token)
    (weight,) = (at for at, each in enumerate(work.parameters) if each.name == "embedding.weight")
    assert work.events.count(Use(weight)) == 2
    assert work.events.count(Gradient(weight)) == 1


def test_modules_and_parameters_stand_in_the_order_of_registration():
    model, batch = made(models.tied_decoder)
    work = read_work(model, batch, models.next_token)
    assert [each.name for each in work.modules] == [name for name, _ in model.named_modules()]
    for each in work.modules[1:]:
        assert work.modules[each.parent or 0].name == each.name.rpartition(".")[0]
    assert [(each.name, each.shape, each.nbytes) for each in work.parameters] == [
        (name, tuple(each.shape), each.nbytes) for name, each in model.named_parameters()
    ]
    for each in work.parameters:
        assert work.modules[each.module].name == each.name.rpartition(".")[0]
    assert (work.samples, work.tokens) == (2, 48)


def test_logits_are_told_from_other_activations_and_with_them_their_float32_copies():
    # The hidden layers have the width of the vocabulary too.
    work = read(lambda: models.decoder(hidden=models.VOCABULARY), models.next_token)
    logits = 2 * 24 * models.VOCABULARY * 2
    # Its values, their logarithms; in backward the gradients of these.
    assert of_kind(work, TensorKind.LOGITS) == [2 * logits] * 4
    assert of_kind(work, TensorKind.INPUT) == [2 * 24 * 8]
    half = read(models.bfloat16_decoder, models.next_token)
    assert sorted(of_kind(half, TensorKind.LOGITS)) == [logits] * 2 + [2 * logits] * 4


def test_activations_are_what_is_alive_when_backward_begins():
    work = read(models.perceptron, models.sum_of_all)
    end = work.events.index(BackwardBegins())
    kinds = {event.tensor: event.kind for event in work.events if isinstance(event, Allocate)}
    alive = {event.tensor for event in work.events[:end] if isinstance(event, Allocate)}
    alive -= {event.tensor for event in work.events[:end] if isinstance(event, Release)}
    activations = {tensor for tensor, kind in kinds.items() if kind is TensorKind.ACTIVATION}
    assert activations == {tensor for tensor in alive if kinds[tensor] is not TensorKind.INPUT}


def test_a_loss_in_the_output_is_taken_by_default():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))
        tokens = models.tokens(vocabulary=64)
    assert "aten.nll_loss_forward" in names(read_work(model, {"input_ids": tokens, "labels": tokens}))


def test_operations_have_kinds_and_read_and_write_each_tensor_once():
    work = read(models.llama, models.next_token)
    kinds = {op.name: op.kind for op in ops(work)}
    assert kinds["aten.mm"] is OpKind.MATMUL
    assert kinds["aten._scaled_dot_product_flash_attention_for_cpu"] is OpKind.ATTENTION
    assert kinds["aten.embedding"] is kinds["aten.embedding_dense_backward"] is OpKind.LOOKUP
    assert kinds["aten.mean"] is kinds["aten._log_softmax"] is OpKind.REDUCTION
    assert kinds["aten._to_copy"] is OpKind.COPY if "aten._to_copy" in kinds else True
    assert kinds["aten.mul"] is kinds["aten.silu"] is OpKind.POINTWISE
    work = read(lambda: (nn.Linear(4, 8, bias=False), torch.zeros(2, 4)), models.sum_of_all)
    forward = ops(work)[0]
    assert (forward.name, forward.flops, forward.nbytes) == ("aten.mm", 2 * 2 * 4 * 8, 4 * (2 * 4 + 4 * 8 + 2 * 8))


def attended(q, k, **options):
    return nn.functional.scaled_dot_product_attention(q, k, k, **options)


def test_attention_that_no_token_pays_to_those_behind_it_is_half_of_it():
    for dtype in (torch.bfloat16, torch.float32):
        for is_causal, keys, computed in ((True, 16, 0.5), (False, 16, 1.0), (True, 32, 1.0)):
            options = {"device": "meta", "dtype": dtype, "requires_grad": True}
            q, k = (torch.zeros(2, 2, length, 8, **options) for length in (16, keys))
            work = read_work(models.Calls(partial(attended, is_causal=is_causal)), (q, k))
            found = [each.computed for each in ops(work) if each.kind is OpKind.ATTENTION]
            assert found == [computed, computed], (dtype, is_causal, keys)


def test_on_an_accelerator_attention_and_dropout_take_its_kernels():
    for dtype, kernel in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        with torch.device("meta"):
            model = nn.Sequential(models.MultiHead(32, dtype), nn.Dropout(0.1), nn.RMSNorm(32, dtype=dtype))
            found = {*names(read_work(model, torch.zeros(2, 16, 32, dtype=dtype)))}
        attention = f"aten._scaled_dot_product_{kernel}_attention"
        assert {attention, f"{attention}_backward", "aten.native_dropout", "aten.native_layer_norm"} <= found
        assert not {"aten.bmm", "aten._softmax", "aten._safe_softmax", "aten.bernoulli_"} & found


class Experts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 32, 48, dtype=dtype))

    def forward(self, x):
        ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)


def test_experts_side_by_side_are_counted_and_in_float32_it_is_told_what_to_do():
    def read_in(dtype):
        with torch.device("meta"):
            return read_work(Experts(dtype), torch.zeros(8, 32, dtype=dtype, requires_grad=True))

    assert flops(read_in(torch.bfloat16)) == 3 * 2 * 8 * 32 * 48
    if not torch_is_older(2, 15):  # which multiplies groups in float32, too
        assert flops(read_in(torch.float32)) == 3 * 2 * 8 * 32 * 48
        return
    said = r"; compute in bfloat16: compute_dtype=torch\.bfloat16, or --precision bf16$"
    with pytest.raises(InputError, match=said):
        read_in(torch.float32)


def test_a_recurrent_layer_is_refused_by_its_name():
    def build(layer):
        return nn.Sequential(nn.Linear(4, 4), layer(4, 4)), torch.zeros(3, 2, 4)

    for layer in (nn.RNN, nn.LSTM, nn.GRU):
        said = rf"^1 \({layer.__name__}\) does not run .*: recurrent layers .* not planned$"
        with pytest.raises(InputError, match=said):
            read(partial(build, layer), models.sum_of_all)


def test_fewer_heads_of_keys_take_the_fused_kernel_where_torch_takes_it():
    for keys, is_grouped in itertools.product((lambda x: x[:, :1], lambda x: x[:1]), (True, False)):

        def attend(x, keys=keys, is_grouped=is_grouped):
            return attended(x, keys(x), enable_gqa=is_grouped)

        def build(attend=attend):
            return nn.Sequential(nn.Linear(16, 16), models.Calls(attend)), torch.zeros(2, 4, 8, 16)

        work = read(build, models.sum_of_all)
        assert peak(work) == pytest.approx(measured(build, models.sum_of_all)[0], rel=0.01)
        is_fused = "FlashAttention" in type(attend(torch.zeros(2, 4, 8, 16, requires_grad=True)).grad_fn).__name__
        assert ("aten._scaled_dot_product_flash_attention_for_cpu" in names(work)) == is_fused


def test_the_model_is_as_it_was():
    model, batch = made(models.decoder)
    read_work(model, batch, models.next_token)
    assert all(each.grad is None and not each._post_accumulate_grad_hooks for each in model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :1])


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient\nhere")


def test_a_model_that_does_not_trace_is_told_with_the_module():
    deciding, failing_later = models.Calls(lambda x: x if x.sum() > 0 else -x), models.Calls(WrongBackward.apply)
    for module, said in (
        (deciding, r"1 \(Calls\) does not run without values: .*meta"),
        (Wrong(4, 4), r"1 \(Wrong\) does not run without values: .*reduction dim"),
        (failing_later, r"1 \(Calls\) does not run without values: no gradient$"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4)).to("meta")
        try:
            raise KeyError("an error that the caller handles")
        except KeyError:
            with pytest.raises(InputError, match=said) as error:
                read_work(model, torch.zeros(2, 4, device="meta"))
        assert "\n" not in str(error.value)
        assert not any(each._forward_hooks for each in model.modules())


def test_a_loss_from_which_backward_cannot_begin_is_told():
    def build():
        return nn.Linear(4, 4), torch.zeros(2, 4)

    for loss, says in (
        (lambda model, batch: torch.zeros(()) * model(batch).sum().item(), "^the loss does not run without values: "),
        (lambda model, batch: None, r"^the loss is None; expected a tensor of one number"),
        (lambda model, batch: model(batch), r"^the loss has the shape \(2, 4\); expected one number"),
        (lambda model, batch: model(batch).detach().sum(), r"^the loss has no gradient: it does not depend on a tra"),
    ):
        with pytest.raises(InputError, match=says):
            read_work(*made(build), loss)
    model, x = made(lambda: (nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4)))
    with pytest.raises(InputError, match=r"^the loss has no gradient: no parameter of the model is trainable"):
        read_work(model, x, own_or_usual_loss)
    model, x = made(lambda: (nn.Sequential(nn.Linear(4, 4), models.Calls(lambda x: x.argmax(-1))), torch.zeros(2, 4)))
    with pytest.raises(InputError, match=r"^the model returns no tensor of floating-point numbers; give a loss"):
        read_work(model, x, own_or_usual_loss)


def test_a_model_with_values_is_refused():
    with pytest.raises(InputError, match=r"weight is on cpu, and not on meta; make it under torch\.device\('meta'\)"):
        read_work(nn.Linear(4, 4), torch.zeros(2, 4, device="meta"))
    with pytest.raises(InputError, match="the batch is on cpu"):
        read_work(made(lambda: nn.Linear(4, 4)), torch.zeros(2, 4))


def test_tensors_with_values_take_their_own_kernels():
    query = torch.randn(1, 2, 4, 8)
    expected = nn.functional.scaled_dot_product_attention(query, query, query), nn.functional.rms_norm(query, [8])
    for device_type in ("cpu", "cuda"):
        with kernels_of(device_type):
            attended = nn.functional.scaled_dot_product_attention(query, query, query)
            normed = nn.functional.rms_norm(query, [8])
        torch.testing.assert_close((attended, normed), expected, rtol=0, atol=0)


def growing(x):
    with torch.no_grad():
        twice = torch.empty(0)
        torch.mul(x, 2, out=twice)
    return x * twice


def test_memory_that_is_resized_in_place_is_followed():
    work = read(lambda: (nn.Sequential(nn.Linear(4, 4), models.Calls(growing)), torch.zeros(2, 4)), models.sum_of_all)
    assert of_kind(work, TensorKind.ACTIVATION) == [2 * 4 * 4, 4]  # what was resized, and the loss
    assert min(heights(work)) == 0


def test_a_mask_is_thought_to_leave_everything_in():
    undecided = models.Calls(lambda x, mask: x if mask.all() else x.masked_fill(mask, 0))
    batch = made(lambda: (torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 4) == 0))
    assert "aten.masked_fill" not in names(read_work(undecided, batch))


def test_a_model_that_fits_nowhere_is_read():
    model, tokens = made(lambda: (models.decoder(width=1 << 16, hidden=1 << 18)[0], models.tokens(64, 8192)))
    work = read_work(model, tokens, models.next_token)
    assert sum(each.nbytes for each in work.parameters) > 2**39
    assert peak(work) > 2**42
    # Six operations for each parameter and token, and attention.
    assert work.flops > 6 * work.tokens * sum(each.numel for each in work.parameters if "blocks" in each.name)


def added(x):
    return x + x.relu()


def num_events_on_a_small_stack():
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(2, 2), *(models.Calls(added) for _ in range(2000))), torch.empty(3, 2)
    found = []
    threading.stack_size(512 << 10)
    thread = threading.Thread(target=lambda: found.append(len(read_work(model, batch, models.sum_of_all).events)))
    thread.start()
    thread.join()
    return found


def test_a_model_of_very_many_layers_does_not_use_up_the_stack():
    (found,) = answer_of(num_events_on_a_small_stack)
    assert found > 2000 * 10


def test_a_loss_that_is_a_parameter_is_read():
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.empty(()))])
        work = read_work(model, torch.empty(2), lambda model, batch: model[0])
    assert [event.parameter for event in work.events if isinstance(event, Gradient)] == [0]
