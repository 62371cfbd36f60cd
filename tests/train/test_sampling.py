"""A model writes as users of samplers expect: greedy at temperature 0, the same for a seed, no prompt lost."""

import pytest
import torch

from sherd.train.config import Config
from sherd.train.models import Decoder
from sherd.train.sampling import continued, readable


@pytest.fixture(scope="module")
def decoder():
    made = Decoder(Config(layers=1, width=16, heads=2, kv_heads=1, hidden=24))
    made.reset_parameters(0)
    with torch.no_grad():
        made.embedding.weight.mul_(30)  # so that some bytes are far likelier than others
    return made


def written(model, prompt=b"ab", length=12, context=8, temperature=1.0, seed=0):
    return bytes(continued(model, context, length, prompt, temperature, seed))


def test_temperature_0_and_next_to_it_takes_the_likeliest_byte_and_of_a_long_text_the_latest_are_seen(decoder):
    tokens = list(b"\0ab")
    for _ in range(12):
        tokens.append(int(decoder(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    assert written(decoder, temperature=0.0, seed=1) == bytes(tokens[1:])
    assert written(decoder, temperature=1e-300) == bytes(tokens[1:])


def test_a_seed_decides_the_text(decoder):
    assert written(decoder, seed=3) == written(decoder, seed=3)
    assert written(decoder, seed=3) != written(decoder, seed=4)


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
    drawn = continued(lambda tokens: logits, context=1, length=4000, prompt=b"", temperature=2.0, seed=0)
    found = torch.tensor(list(drawn)).bincount(minlength=256)
    expected = torch.softmax(torch.tensor([0.0, 0.5, 1.0]), 0)
    torch.testing.assert_close(found[65:68] / 4000, expected, atol=0.03, rtol=0)


def test_pieces_of_text_are_those_of_all_bytes_at_once():
    for raw in ("naïve 漢字 é".encode(), b"a\0b", b"\xff\xc3", b"\xe6\0\xbc", b""):
        assert "".join(readable(raw)) == raw.replace(b"\0", b"\n\n").decode(errors="replace"), raw
