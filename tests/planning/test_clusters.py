"""Cluster files read, shipped ones name their sources, and what is wrong in one is told in a line."""

import re
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.cli import main as cli
from sherd.errors import ClusterError
from sherd.tools.simulate.cluster import (
    FIELDS,
    OPTIONAL,
    Link,
    Timed,
    cluster_toml,
    read_cluster,
    shipped_clusters,
    texts_of,
)
from sherd.tools.simulate.work import OpKind
from tests.support.commands import refusal
from tests.support.refusals import one_line
from tests.support.suites import examples

TOML = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest needs the latter itself
ROOT = Path(__file__).parents[2]
H100 = (ROOT / "sherd/tools/simulate/clusters/h100.toml").read_text()


def read(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    return read_cluster(tmp_path / "mine.toml")


complaint = partial(one_line, ClusterError, read)
"""The line in which a file with this text is refused."""


def changed(name, value):
    """The file of the H100 with `value`, in TOML's words, in the place of a field's; None takes the field out."""
    *tables, leaf = name.split(".")
    line = rf"(?m)^{leaf} = .*\n"
    head = f"[{'.'.join(tables)}]\n" if tables else ""
    before, found, rest = H100.partition(head) if head else ("", "", H100)
    return before + found + re.sub(line, lambda _: "" if value is None else f"{leaf} = {value}\n", rest, count=1)


# What is shipped


def test_the_promised_clusters_are_shipped_and_each_of_their_figures_has_a_source():
    for name in shipped_clusters():
        cluster = read_cluster(name)
        assert cluster.name == name
        assert all(0 < cluster.device.flops[dtype] <= peak for dtype, peak in cluster.device.peak_flops.items()), name
        assert 0 < cluster.device.library_bytes < cluster.device.memory, name
        assert cluster.within.bandwidth > cluster.across.bandwidth, name
        figures = {field for field in texts_of(cluster) if field not in ("name", "device.name", "device.overlaps")}
        told = {field for field in figures if any(f"{field}.".startswith(f"{source}.") for source in cluster.sources)}
        assert figures - told == set(), name
    assert shipped_clusters() == ["a100", "b200", "h100", "h200", "laptop", "mi300x"]


def test_units_are_read():
    cluster = read_cluster("h100")
    assert cluster.device.memory == round(79.1 * 2**30)
    assert cluster.device.bandwidth == 2.94e12
    assert cluster.device.flops["bfloat16"] == 600e12
    assert cluster.device.launch == pytest.approx(4e-6)
    assert cluster.within.bandwidth == 368e9
    assert cluster.device.shares[OpKind.LOOKUP] == 0.6
    assert (cluster.price_per_hour, cluster.currency, cluster.device.overlaps) == (3.0, "USD", True)
    assert (cluster.device.beside, read_cluster("laptop").device.beside) == (0.84, 1.0)


def test_a_cluster_that_was_written_reads_as_it_was(tmp_path):
    for name in shipped_clusters():
        cluster = replace(read_cluster(name), sources={"device.flops": 'a "quoted" \\ text\nof two lines'})
        again = read(tmp_path, cluster_toml(cluster))
        assert texts_of(again) == texts_of(cluster)
        assert again.sources == {"device.flops": 'a "quoted" \\ text of two lines'}


def test_the_table_of_the_documents_is_that_of_the_files():
    text = (ROOT / "docs/look_up/clusters.md").read_text()
    (table,) = re.findall(r"<!-- shipped -->\n\n(.*?)\n\n<!-- /shipped -->", text, re.DOTALL)
    columns = [texts_of(read_cluster(name)) for name in shipped_clusters()]
    rows = [["field", *shipped_clusters()], ["---"] * (len(columns) + 1)]
    rows += [[f"`{name}`", *(column.get(name, "") for column in columns)] for name in FIELDS if name != "name"]
    rows = [row for row in rows if any(row[1:])]
    assert table == "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_operations_that_were_timed_read_as_they_were_written(tmp_path):
    timed = {
        "mm.float32": (Timed(151_000_000, 2_360_000, 384, 977e-6), Timed(1_000, 20, 2, 1e-6)),
        "_log_softmax.bfloat16": (Timed(0, 512, 0, 3e-9), Timed(0, 40_000_000, 0, 2.5)),
    }
    cluster = read_cluster("laptop")
    cluster = replace(cluster, device=replace(cluster.device, timed=timed), optimizer=Link(75e-6, 26.6e9))
    again = read(tmp_path, cluster_toml(cluster))
    assert again.device.timed.keys() == timed.keys()
    for name, points in timed.items():
        for one, other in zip(again.device.timed[name], points, strict=True):
            assert (one.flops, one.nbytes, one.depth) == (other.flops, other.nbytes, other.depth)
            assert one.seconds == pytest.approx(other.seconds)
    links = {"from_host": Link(1e-5, 5e10), "disk": Link(1e-4, 3e9)}
    cluster = replace(cluster, **links, host_bandwidth=4e10, one_memory=True)
    again = read(tmp_path, cluster_toml(cluster))
    assert texts_of(again) == texts_of(cluster)
    assert again.one_memory
    assert (again.optimizer.latency, again.optimizer.bandwidth) == (pytest.approx(75e-6), pytest.approx(26.6e9))


def test_skew_is_written_where_compute_waits_for_collectives(tmp_path):
    laptop, h100 = read_cluster("laptop"), read_cluster("h100")
    late = replace(laptop, device=replace(laptop.device, skew=2.5e-4))
    assert 'device.skew = "250 us"' in cluster_toml(late)
    assert read(tmp_path, cluster_toml(late)).device.skew == pytest.approx(2.5e-4)
    assert laptop.device.skew == h100.device.skew == 0
    assert "skew" not in cluster_toml(h100)


WRONG_OPERATIONS = (
    '"2 MB: 97 us"',
    "[]",
    '["2 MB"]',
    '["2 MB: 97"]',
    '["2 MB/s: 97 us"]',
    '["-2 MB: 97 us"]',
    '["1 GFLOP, 2 MB, deep: 97 us"]',
    '["1 TFLOP/s, 2 MB, 3 deep: 97 us"]',
    '["2 MB: 97 us", 3]',
    "{a = 1}",
    "3",
)


def test_a_timed_operation_that_is_wrong_and_half_a_link_are_told_in_one_line(tmp_path):
    text = H100 + "\n[device.timed.mm]\n{} = {}\n"
    for value in WRONG_OPERATIONS:
        assert "device.timed.mm.float32" in complaint(tmp_path, text.format("float32", value)), value
    good = '["2 MB: 97 us"]'
    assert "unknown field 'device.timed.mm.float99'" in complaint(tmp_path, text.format("float99", good))
    for dtype in ("float32", "bool", "int64", "float8_e4m3fn"):
        assert {*read(tmp_path, text.format(dtype, good)).device.timed} == {f"mm.{dtype}"}
    halves = (('latency = "1 us"', "bandwidth"), ('bandwidth = "1 GB/s"', "latency"))
    for link, (left, missing) in product(("optimizer", "from_host", "disk"), halves):
        said = complaint(tmp_path, f"{H100}\n[{link}]\n{left}\n")
        assert f"{link}.{missing} is missing; expected" in said


# What is wrong


EXPECTED = {  # of fields, with values in TOML's words that they do not take
    "device.memory": (
        "bytes",
        ('"80 Gib"', "80", '"-80 GiB"', '"80 GiB/s"', '"1e400 GiB"', '"0 GiB"', '"0.4 B"', '["80 GiB"]'),
    ),
    "device.bandwidth": ("bytes per second", ('"3.35 TB"', '"0 TB/s"')),
    "device.flops.bfloat16": ("FLOP per second", ('"700 TFLOPS"', None)),
    "device.flops.float32": ("FLOP per second", (None,)),
    "device.peak_flops.bfloat16": ("FLOP per second", (None,)),
    "device.launch": ("a time, as", ('"5"', '"5 us\\n"', '"\\u0665 us"')),
    "device.attention_share": ("a number above 0 and up to 1", ("-0.5", "nan", "1.5", '"0.5"', "true")),
    "device.shares.copy": ("a number above 0 and up to 1", ("2",)),
    "device.overlaps": ("true or false", ("1",)),
    "device.name": ("a text", ('" "',)),
    "devices_per_node": ("a whole number", ("0", "8.0")),
    "price_per_hour": ("a price", ('"3 dollars"', "3.0")),
    "within.latency": ("a time", (None,)),
}
WRONG_FIELDS = (
    ("device.memory", '"80 Gib"', 'device.memory = \'80 Gib\'; expected bytes, as "80 GiB" or "80 GB"'),
    ("device.memory", '"1 GiB"', "device.library_bytes = '1.8 GiB'; expected less than device.memory, 1 GiB"),
    ("device.flops.bfloat16", '"1 PFLOP/s"', "device.flops.bfloat16 = '1 PFLOP/s'; expected at most device.peak_"),
    ("device.memory", "{a = 1}", "unknown field 'device.memory.a' = 1; did you mean device.memory?"),
)
WRONG_FILES = (
    (f'nmae = "h100"\n{H100}', "unknown field 'nmae' = 'h100'; did you mean name?"),
    (f'{H100}\n[device.shares.lookups]\nx = "{"y" * 99}"\n', "unknown field 'device.shares.lookups.x' = 'yyyy"),
    (f'{H100}"device.flop" = "me"\n', "unknown field 'sources.device.flop'; expected the name of a field"),
    (f'{H100}"device" = 3\n', "sources.device = 3; expected a text"),
    (f"{'a.' * 3000}a = 1\n{H100}", "unknown field 'a.a.a."),
    ("name = ", "does not parse as TOML"),
    ("a = " + "[" * 20000, "does not parse as TOML"),
    ("", "name is missing; expected a text"),
)


def test_a_field_or_a_file_that_is_wrong_is_told_in_one_line(tmp_path):
    rows = [*WRONG_FIELDS]
    for field, (expected, values) in EXPECTED.items():
        for value in values:
            found = "is missing" if value is None else f"= {TOML.loads(f'a = {value}')['a']!r}"
            rows.append((field, value, f"{field} {found}; expected {expected}"))
    for field, value, why in rows:
        assert complaint(tmp_path, changed(field, value)).startswith(f"{tmp_path / 'mine.toml'}: {why}"), (field, value)
    for text, why in WRONG_FILES:
        said = complaint(tmp_path, text)
        assert why in said
        assert len(said) < 1500


def test_a_cluster_that_is_not_there_is_told_with_those_that_are(tmp_path, capsys, monkeypatch):
    for name, why in (
        ("h10", "cannot read the cluster 'h10': No such file or directory; did you mean h100?"),
        ("mine.yaml", "expected a file, or one of a100, b200"),
        ("\0", "does not parse"),
        (str(tmp_path), "Is a directory"),
    ):
        with pytest.raises(ClusterError, match=re.escape(why)):
            read_cluster(name)
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(ClusterError, match="does not parse as TOML"):
        read_cluster(tmp_path / "x.toml")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cli, "parse", lambda words: read_cluster("h10"))
    said = "sherd doctor: cannot read the cluster 'h10': No such file or directory; did you mean h100?\n"
    assert refusal(capsys, "doctor") == said


VALUES = st.one_of(
    st.none(),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["true", "[]", "{}", "1979-05-27", "{a = {b = []}}"]),
    st.tuples(
        st.sampled_from(["", "-", "0", "1", "1e3", "1e999", "3.35", "0x1", "1_0", ".5"]),
        st.sampled_from(["", " ", "  "]),
        st.sampled_from(["GiB", "GB/s", "TFLOP/s", "us", "s", "USD", "gib", "%"]),
    ).map(lambda parts: '"' + "".join(parts) + '"'),
)


@settings(max_examples=examples(300))
@given(st.sampled_from(sorted(FIELDS)), VALUES)
def test_whatever_stands_in_a_field_it_reads_or_is_told_in_one_line(tmp_path_factory, field, value):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(changed(field, value))
    try:
        told = "" if read_cluster(path).device.memory > 0 else "no memory"
    except ClusterError as error:
        told = str(error)
    if told:
        assert str(path) in told
        assert field in told
        assert "\n" not in told
    else:
        assert value is not None or field in OPTIONAL
