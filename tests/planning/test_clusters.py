"""Do cluster files read, do shipped ones name their sources, and is what is wrong in one told in a line?"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import ClusterError
from sherd.simulate.cluster import Link, Timed
from sherd.simulate.cluster_file import FIELDS, OPTIONAL, cluster_toml, read_cluster, shipped_clusters, texts_of
from sherd.simulate.work import OpKind
from sherd.train import cli
from tests.support.suites import examples

ROOT = Path(__file__).parents[2]
H100 = (ROOT / "sherd/simulate/clusters/h100.toml").read_text()


def read(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    return read_cluster(tmp_path / "mine.toml")


def changed(name, value):
    """The file of the H100 with `value`, in TOML's words, in the place of a field's; None takes the field out."""
    *tables, leaf = name.split(".")
    line = rf"(?m)^{leaf} = .*\n"
    head = f"[{'.'.join(tables)}]\n" if tables else ""
    before, found, rest = H100.partition(head) if head else ("", "", H100)
    return before + found + re.sub(line, lambda _: "" if value is None else f"{leaf} = {value}\n", rest, count=1)


# What is shipped


def test_the_clusters_that_are_promised_are_shipped():
    assert shipped_clusters() == ["a100", "b200", "h100", "h200", "laptop", "mi300x"]


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_shipped_cluster_reads_and_each_of_its_figures_has_a_source(name):
    cluster = read_cluster(name)
    assert cluster.name == name
    assert all(0 < cluster.device.flops[dtype] <= peak for dtype, peak in cluster.device.peak_flops.items())
    assert 0 < cluster.device.library_bytes < cluster.device.memory
    assert cluster.within.bandwidth > cluster.across.bandwidth
    figures = {field for field in texts_of(cluster) if field not in ("name", "device.name", "device.overlaps")}
    told = {field for field in figures if any(f"{field}.".startswith(f"{source}.") for source in cluster.sources)}
    assert figures - told == set()


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


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_cluster_that_was_written_reads_as_it_was(tmp_path, name):
    cluster = replace(read_cluster(name), sources={"device.flops": 'a "quoted" \\ text\nof two lines'})
    again = read(tmp_path, cluster_toml(cluster))
    assert texts_of(again) == texts_of(cluster)
    assert again.sources == {"device.flops": 'a "quoted" \\ text of two lines'}


def test_the_table_of_the_documents_is_that_of_the_files():
    text = (ROOT / "docs/clusters.md").read_text()
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
    assert (again.optimizer.latency, again.optimizer.bandwidth) == (pytest.approx(75e-6), pytest.approx(26.6e9))


def test_skew_is_written_where_compute_waits_for_collectives(tmp_path):
    laptop, h100 = read_cluster("laptop"), read_cluster("h100")
    late = replace(laptop, device=replace(laptop.device, skew=2.5e-4))
    assert 'device.skew = "250 us"' in cluster_toml(late)
    assert read(tmp_path, cluster_toml(late)).device.skew == pytest.approx(2.5e-4)
    assert laptop.device.skew == h100.device.skew == 0
    assert "skew" not in cluster_toml(h100)


@pytest.mark.parametrize(
    "value",
    [
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
    ],
)
def test_an_operation_that_is_wrong_is_told_in_one_line(tmp_path, value):
    with pytest.raises(ClusterError, match=r"device\.timed\.mm\.float32") as error:
        read(tmp_path, f"{H100}\n[device.timed.mm]\nfloat32 = {value}\n")
    assert "\n" not in str(error.value)


def test_a_dtype_of_timed_operations_that_is_none_is_unknown(tmp_path):
    text = '\n[device.timed.mm]\n{} = ["2 MB: 97 us"]\n'
    with pytest.raises(ClusterError, match=r"unknown field 'device\.timed\.mm\.float99'"):
        read(tmp_path, H100 + text.format("float99"))
    for dtype in ("float32", "bool", "int64", "float8_e4m3fn"):
        assert {*read(tmp_path, H100 + text.format(dtype)).device.timed} == {f"mm.{dtype}"}


@pytest.mark.parametrize(("left", "missing"), [("latency", "bandwidth"), ("bandwidth", "latency")])
def test_half_an_optimizer_is_missing_the_other_half(tmp_path, left, missing):
    value = {"latency": "1 us", "bandwidth": "1 GB/s"}[left]
    with pytest.raises(ClusterError, match=f"optimizer.{missing} is missing; expected"):
        read(tmp_path, f'{H100}\n[optimizer]\n{left} = "{value}"\n')


# What is wrong


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("device.memory", '"80 Gib"', 'device.memory = \'80 Gib\'; expected bytes, as "80 GiB" or "80 GB"'),
        ("device.memory", "80", "device.memory = 80; expected bytes"),
        ("device.memory", '"-80 GiB"', "device.memory = '-80 GiB'; expected bytes"),
        ("device.memory", '"80 GiB/s"', "device.memory = '80 GiB/s'; expected bytes"),
        ("device.memory", '"1e400 GiB"', "device.memory = '1e400 GiB'; expected bytes"),
        ("device.bandwidth", '"3.35 TB"', "device.bandwidth = '3.35 TB'; expected bytes per second"),
        ("device.bandwidth", '"0 TB/s"', "device.bandwidth = '0 TB/s'; expected bytes per second"),
        ("device.flops.bfloat16", '"700 TFLOPS"', "device.flops.bfloat16 = '700 TFLOPS'; expected FLOP per second"),
        ("device.launch", '"5"', "device.launch = '5'; expected a time, as"),
        ("device.launch", '"5 us\\n"', "device.launch = '5 us\\n'; expected a time, as"),
        ("device.launch", '"\\u0665 us"', "device.launch = '\u0665 us'; expected a time, as"),
        ("device.memory", '"0 GiB"', "device.memory = '0 GiB'; expected bytes"),
        ("device.attention_share", "-0.5", "device.attention_share = -0.5; expected a number above 0"),
        ("device.attention_share", "nan", "device.attention_share = nan; expected a number above 0"),
        ("device.attention_share", "1.5", "device.attention_share = 1.5; expected a number above 0 and up to 1"),
        ("device.shares.copy", "2", "device.shares.copy = 2; expected a number above 0 and up to 1"),
        ("device.memory", '"0.4 B"', "device.memory = '0.4 B'; expected bytes"),
        ("device.memory", '"1 GiB"', "device.library_bytes = '1.8 GiB'; expected less than device.memory, 1 GiB"),
        ("device.flops.bfloat16", '"1 PFLOP/s"', "device.flops.bfloat16 = '1 PFLOP/s'; expected at most device.peak_"),
        ("device.flops.bfloat16", None, "device.flops.bfloat16 is missing; expected FLOP per second"),
        ("device.peak_flops.bfloat16", None, "device.peak_flops.bfloat16 is missing; expected FLOP per second"),
        ("device.attention_share", '"0.5"', "device.attention_share = '0.5'; expected a number above 0"),
        ("device.attention_share", "true", "device.attention_share = True; expected a number above 0"),
        ("device.overlaps", "1", "device.overlaps = 1; expected true or false"),
        ("device.name", '" "', "device.name = ' '; expected a text"),
        ("devices_per_node", "0", "devices_per_node = 0; expected a whole number"),
        ("devices_per_node", "8.0", "devices_per_node = 8.0; expected a whole number"),
        ("price_per_hour", '"3 dollars"', "price_per_hour = '3 dollars'; expected a price"),
        ("price_per_hour", "3.0", "price_per_hour = 3.0; expected a price"),
        ("within.latency", None, "within.latency is missing; expected a time"),
        ("device.flops.float32", None, "device.flops.float32 is missing; expected FLOP per second"),
        ("device.memory", '["80 GiB"]', "device.memory = ['80 GiB']; expected bytes"),
        ("device.memory", "{a = 1}", "unknown field 'device.memory.a' = 1; did you mean device.memory?"),
    ],
)
def test_a_field_that_is_wrong_is_told_in_one_line(tmp_path, field, value, why):
    with pytest.raises(ClusterError) as error:
        read(tmp_path, changed(field, value))
    assert str(error.value).startswith(f"{tmp_path / 'mine.toml'}: {why}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'nmae = "h100"\n{H100}', "unknown field 'nmae' = 'h100'; did you mean name?"),
        (f'{H100}\n[device.shares.lookups]\nx = "{"y" * 99}"\n', "unknown field 'device.shares.lookups.x' = 'yyyy"),
        (f'{H100}"device.flop" = "me"\n', "unknown field 'sources.device.flop'; expected the name of a field"),
        (f'{H100}"device" = 3\n', "sources.device = 3; expected a text"),
        (f"{'a.' * 3000}a = 1\n{H100}", "unknown field 'a.a.a."),
        ("name = ", "does not parse as TOML"),
        ("a = " + "[" * 20000, "does not parse as TOML"),
        ("", "name is missing; expected a text"),
    ],
)
def test_a_file_that_is_wrong_is_told_in_one_line(tmp_path, text, why):
    with pytest.raises(ClusterError) as error:
        read(tmp_path, text)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


def test_a_cluster_that_is_not_there_is_told_with_those_that_are(tmp_path):
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


def test_the_command_tells_it_in_one_line(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cli, "parse", lambda words: read_cluster("h10"))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        "sherd doctor: cannot read the cluster 'h10': No such file or directory; did you mean h100?\n"
    )


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
