"""A model writes as users of samplers expect: greedy at temperature 0, the same for a seed, no prompt lost."""

import pytest
import torch

from sherd.train.config import ModelConfig
from sherd.train.models import Decoder
from sherd.train.sampling import Draw, continued, readable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder():
    made = Decoder(ModelConfig(layers=1, width=16, heads=2, kv_heads=1, hidden=24))
    made.reset_parameters(0)
    with torch.no_grad():
        made.embedding.weight.mul_(30)  # so that some bytes are far likelier than others
    return made


def written(model, prompt=b"ab", length=12, context=8, **draw):
    return bytes(continued(model, prompt, length, context, Draw(**{"temperature": 1.0, **draw}), CPU))


def test_temperature_0_and_next_to_it_takes_the_likeliest_byte_and_of_a_long_text_the_latest_are_seen(decoder):
    tokens = list(b"\0ab")
    for _ in range(12):
        tokens.append(int(decoder(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    assert written(decoder, temperature=0.0, seed=1) == bytes(tokens[1:])
    assert written(decoder, temperature=1e-300) == bytes(tokens[1:])


def test_a_seed_decides_the_text_and_each_sample_of_it_is_another(decoder):
    assert written(decoder, seed=3) == written(decoder, seed=3)
    assert len({written(decoder, seed=seed, number=number) for seed in (3, 4) for number in (0, 1)}) == 4


def test_a_prompt_longer_than_the_context_is_cut_from_the_left_for_the_model_and_not_in_the_text(decoder):
    seen = []

    def logits(tokens):
        seen.append(tokens.tolist())
        return decoder(tokens)

    text = written(logits, prompt=b"0123456789", length=1, context=4)
    assert text[:-1] == b"0123456789"
    assert seen == [[list(b"6789")]]
    assert written(decoder, length=0) == b"ab", "no length gives back the prompt"


def test_bytes_come_as_often_as_their_odds_say():
    logits = torch.full((1, 1, 300), -torch.inf)
    logits[0, 0, 65], logits[0, 0, 66], logits[0, 0, 67] = 0.0, 1.0, 2.0
    logits[0, 0, 299] = 9.0  # no byte: of a larger vocabulary only bytes are drawn
    draw, source = Draw(temperature=2.0), Draw(2.0).generator()
    found = torch.tensor([draw.next(logits[0, 0], source) for _ in range(4000)]).bincount(minlength=256)
    expected = torch.softmax(torch.tensor([0.0, 0.5, 1.0]), 0)
    torch.testing.assert_close(found[65:68] / 4000, expected, atol=0.03, rtol=0)


def test_of_the_likeliest_k_bytes_no_other_is_drawn():
    logits = torch.arange(256.0) / 100
    draw, source = Draw(temperature=1.0, top_k=3), Draw(1.0).generator()
    assert {draw.next(logits, source) for _ in range(100)} == {253, 254, 255}
    assert Draw(1.0, top_k=1).next(logits, source) == 255
    assert 0 <= Draw(1.0, top_k=999).next(logits, source) < 256


def test_pieces_of_text_are_those_of_all_bytes_at_once():
    for raw in ("naïve 漢字 é".encode(), b"a\0b", b"\xff\xc3", b"\xe6\0\xbc", b""):
        assert "".join(readable(raw)) == raw.replace(b"\0", b"\n\n").decode(errors="replace"), raw
