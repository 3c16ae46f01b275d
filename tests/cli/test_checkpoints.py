"""`moemesh checkpoint`: its output for whole, damaged, poisoned and different checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import manifest, ownership, retention
from moemesh.checkpoint.ownership import Claim
from moemesh.checkpoint.remote import place_of
from moemesh.checkpoint.stored import Damage
from moemesh.cli.checkpoints import by_file
from moemesh.train.records.run_folder import RunFolder
from tests.checkpoint.simulate import as_format_1, cut, save_as_ranks, save_one, whole
from tests.test_cli import Invoke, run_all_guarded

STATE: dict[str, Any] = {"layout": {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 2, "etp": 1}}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run of three checkpoints of two ranks, the last one not finite."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    big = torch.arange(3_000_000.0).reshape(1000, 3000)  # 12 MB: two chunks a rank
    for step in (1, 2, 3):
        small = torch.full((4,), float(step), dtype=torch.bfloat16)
        if step == 3:
            small[1] = float("nan")
        shards = [[shard] for shard in cut("big", big + (step > 1), [2, 1])]
        shards[0].append(whole("small", small))
        save_as_ranks(folder, step, shards, {**STATE, "step": step})
    return folder.parent


@pytest.fixture
def call(invoke: Invoke) -> Any:
    return lambda *words: invoke("checkpoint", *map(str, words))


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 4]))


def test_ls(made: Path, call: Any) -> None:
    code, out, _ = call("ls", made)
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split() == ["step", "size", "tensors", "layout", "verified", "age"]
    assert rows[1].startswith("3     11.4 MiB        2  dp2 ep2  no, not finite")
    shutil.copytree(made / "checkpoints/step-1", made / "checkpoints/step-7")
    assert call("verify", made / "step-2")[0] == 0
    content = json.loads(call("ls", made / "checkpoints", "--json")[1])
    seven, three, two, one = content["checkpoints"]
    assert "is of step 1: a renamed folder?" in seven["problem"] and not seven["verified"]
    assert (three["verified"], two["verified"], one["verified"]) == (False, True, False)
    assert two["layout"] == STATE["layout"] and two["finite"] and not three["finite"]


def test_verify_names_tensor_chunk_and_file(made: Path, call: Any) -> None:
    code, out, _ = call("verify", made)
    assert code == 0 and "numbers that are not finite: small" in out
    size = (made / "checkpoints/step-2/rank-00001.safetensors").stat().st_size
    flip(made / "checkpoints/step-2/rank-00001.safetensors", size - 1)
    flip(made / "checkpoints/step-2/rank-00000.safetensors", 200)
    (made / "checkpoints/step-1/rank-00000.safetensors").unlink()
    (made / "checkpoints/step-1/notes").write_text("mine")
    code, out, _ = call("verify", made, "--json")
    assert code == 1
    three, two, one = json.loads(out)["checkpoints"]
    assert not three["damaged"] and two["damaged"] and one["damaged"]
    damaged = [(d["file"], d["tensor"], d["offset"], d["chunk"]) for d in two["damages"]]
    assert ("rank-00001.safetensors", "big", [500, 0], 1) in damaged and len(damaged) == 2
    assert [(d["file"], d["reason"]) for d in one["damages"]] == [
        ("rank-00000.safetensors", "missing"),
        ("notes", "does not belong to this checkpoint"),
    ]
    code, out, _ = call("verify", made / "step-2")
    assert code == 1 and "rank-00001.safetensors: big, slice at [500, 0], chunk 1: digest" in out


def test_verify_of_the_first_format_names_the_file(made: Path, call: Any) -> None:
    as_format_1(made / "checkpoints/step-2")
    assert call("verify", made / "step-2")[0] == 0
    flip(made / "checkpoints/step-2/rank-00001.safetensors", 5000)
    code, out, _ = call("verify", made / "step-2")
    assert code == 1 and "rank-00001.safetensors: digest blake2b-128:" in out


def test_diff(made: Path, call: Any) -> None:
    code, out, _ = call("diff", made / "step-1", made / "step-2")
    assert code == 1
    rows = [line.split() for line in out.splitlines()]
    assert ["small", "bfloat16", "4", "of", "4", "1", "1"] in rows
    assert ["big", "float32", "3,000,000", "of", "3,000,000", "1", "3.33e-07"] in rows
    assert "step: 1 and 2" in out and "0 tensors are equal to the bit, 2 differ" in out
    code, out, _ = call("diff", made / "step-2", made, "--json")
    content = json.loads(out)
    assert code == 1 and content["equal"] == 1
    (small,) = content["different"]
    assert small["num_nonfinite"] == [0, 1] and small["largest"] == 1.0
    # another layout of the same numbers, one tensor more and one of another dtype
    other = made.parent / "other"
    big = torch.arange(3_000_000.0).reshape(1000, 3000) + 1
    more = [whole("big", big), whole("extra", big[0]), whole("small", torch.full((4,), 2.0))]
    save_one(other, 5, more, {"step": 5})
    code, out, _ = call("diff", made / "step-2", other)
    assert code == 1 and "1 tensors are equal to the bit, 0 differ, 0 are only in A, 1" in out
    assert "extra: only in B" in out and "small: bfloat16 [4] and float32 [4]" in out
    assert call("diff", made / "step-2", made / "checkpoints/step-2")[0] == 0


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64, torch.int32]
)
def test_diff_of_every_kind_of_number(tmp_path: Path, call: Any, dtype: torch.dtype) -> None:
    first = torch.tensor([-1.5, 0.0, 2.0, 8.0]).to(dtype)
    second = torch.tensor([-1.5, 0.25, 2.0, 5.0]).to(dtype)
    save_one(tmp_path / "a", 1, [whole("w", first)])
    save_one(tmp_path / "b", 1, [whole("w", second)])
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b", "--json")
    (row,) = json.loads(out)["different"]
    assert code == 1 and row["largest"] == 3.0 and row["relative"] == 3 / 8
    assert row["num_different"] == int((first.double() != second.double()).sum())


def test_prune(made: Path, call: Any) -> None:
    (made / "checkpoints" / ("step-9.tmp-" + "0" * 32)).mkdir()
    code, out, _ = call("prune", made, "--keep", 1, "--dry-run")
    assert code == 0 and "step 1: would be deleted" in out and "step 2: kept, verified" in out
    assert "step 3: kept, verified; holds numbers that are not finite" in out
    assert len(list((made / "checkpoints").glob("step-*"))) == 4
    (made / "lease").touch()
    holder = RunFolder(made, has_run=True)
    holder.lock()
    code, _, err = call("prune", made)
    assert code == 2 and "is in use by a run (pid " in err and "prune when it has ended" in err
    holder.release()
    (made / "config.toml").write_text("[train]\ncheckpoints_kept = 1\n")
    content = json.loads(call("prune", made, "--json")[1])
    assert content["deleted"] == [1] and len(content["leftovers"]) == 1
    assert sorted(path.name for path in (made / "checkpoints").iterdir()) == [
        "step-2", "step-3", "verified.json",
    ]  # fmt: skip
    assert "nothing to delete" in call("prune", made)[1]


def test_a_diff_of_different_models_is_short(tmp_path: Path, call: Any) -> None:
    save_one(tmp_path / "a", 1, [whole("w", torch.ones(1))])
    save_one(tmp_path / "b", 1, [whole(f"v{n:02}", torch.ones(1)) for n in range(50)])
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "w: only in A" in out and "... and 30 more only in B: --all" in out
    assert len(out.splitlines()) < 30
    assert "v49: only in B" in call("diff", tmp_path / "a", tmp_path / "b", "--all")[1]


def test_an_address_and_a_run_that_keeps_its_checkpoints_there(
    made: Path, call: Any, tmp_path: Path
) -> None:
    shutil.copytree(made / "checkpoints", tmp_path / "kept")
    address = f"file://{tmp_path}/kept"
    run_folder = tmp_path / "elsewhere"
    run_folder.mkdir()
    text = f'[train]\ncheckpoint_folder = "{address}"\ncheckpoints_kept = 1\n'
    (run_folder / "config.toml").write_text(text)
    for place in (address, run_folder):
        assert call("ls", place)[1].splitlines()[1].startswith("3     11.4 MiB        2  dp2 ep2")
        assert call("verify", place)[0] == 0
    assert call("diff", made / "step-2", f"{address}/step-2")[0] == 0
    code, _, err = call("prune", address)
    assert code == 2 and "give the run, or --keep" in err
    (tmp_path / "kept/step-9.tmp-0123456789abcdef0123456789abcdef").mkdir()
    assert "step 1: deleted" in call("prune", address, "--keep", 1)[1]
    # of an address alone it is not known who else writes there
    assert len(list((tmp_path / "kept").glob("*.tmp-*"))) == 1
    content = json.loads(call("prune", run_folder, "--json")[1])
    assert (content["deleted"], len(content["leftovers"])) == ([], 1)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_prune_of_a_folder_that_a_run_owns_is_refused(
    made: Path, call: Any, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(ownership, "_HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(ownership, "_LOOK_SECONDS", 0.02)
    place = f"{scheme}{made.rename(made.with_name('kept'))}/checkpoints"
    owner = Claim.take(place_of(place), "a run elsewhere")
    code, _, err = call("prune", place, "--keep", 1)
    assert code == 2 and "is in use by a run (pid " in err and "prune when it has ended" in err
    assert owner.lost() is None and "Traceback" not in err
    assert "step 1: would be deleted" in call("prune", place, "--keep", 1, "--dry-run")[1]
    # The owner's process dies: its counter stays the same from now on.
    owner._ended.set()
    owner._thread.join()
    monkeypatch.setattr(ownership, "_OBSERVE_SECONDS", 0.05)
    code, out, err = call("prune", place, "--keep", 1)
    assert code == 0 and "step 1: deleted" in out and "for its heartbeat" in err
    # An owner that was only asleep makes no further commit; the next run does not wait for it.
    assert owner.lost() is not None
    Claim.take(place_of(place), "the next", log=pytest.fail).release()


def test_a_run_that_starts_while_a_folder_is_pruned_ends_the_pruning(
    made: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made / "checkpoints"
    Claim.take(place, "a run").release()
    plan = retention.plan_pruning

    def slowly(*arguments: Any, **keys: Any) -> retention.Pruning:
        Claim.take(place, "another", takeover=True).release()
        return plan(*arguments, **keys)

    monkeypatch.setattr(retention, "plan_pruning", slowly)
    code, _, err = call("prune", place, "--keep", 1)
    assert code == 2 and "taken over" in err and "nothing more was deleted" in err
    assert (place / "step-1").is_dir()


def test_a_name_that_no_terminal_can_show(made: Path, call: Any) -> None:
    """A string that is legal in JSON and not in UTF-8: the output escapes it."""
    file = made / "checkpoints/step-3/manifest.json"
    content = json.loads(file.read_bytes())
    del content["digest"]
    content["tensors"]["\ud800"] = {**content["tensors"].pop("big"), "slices": []}
    file.write_bytes(manifest.encode_json({**content, "digest": manifest._digest(content)}))
    for verb, code in (("ls", 0), ("verify", 1), ("prune", 0)):
        done, out, _ = call(verb, made)
        assert done == code and "\\ud800 [1000, 3000]: no rank holds" in out


def test_wrong_places(made: Path, call: Any, tmp_path: Path) -> None:
    for arguments, message in (
        (("ls", tmp_path / "nowhere"), "nowhere: no folder"),
        (("ls", tmp_path), "holds no checkpoint"),
        (("verify", made / "step-8"), "this checkpoint does not exist; it has the steps 1, 2, 3"),
        (("prune", made / "step-1"), "is one checkpoint; give the run"),
        (("prune", made, "--keep", 0), "--keep must be at least 1, not 0"),
    ):
        code, _, err = call(*arguments)
        assert code == 2 and message in err, err


def test_no_torch(made: Path) -> None:
    done = run_all_guarded(
        {"torch"},
        ["checkpoint", "ls", str(made)],
        ["checkpoint", "verify", str(made)],
        ["checkpoint", "diff", str(made / "step-1"), str(made / "step-2")],
        ["checkpoint", "prune", str(made), "--keep", "1"],
    )
    assert "forbidden" not in done.stderr and "deleted" in done.stdout, done


def test_damage_of_a_cut_file_is_summarised(made: Path, call: Any) -> None:
    file = made / "checkpoints/step-2/rank-00001.safetensors"
    every = [Damage(file.name, "digest", "big", (0, 0), chunk) for chunk in range(40)]
    every += [Damage(file.name, "digest", "small", (0,), 0), Damage("notes", "not ours")]
    lines = by_file(every)
    assert lines == [
        f"{every[0]}; and 40 more of 2 tensors in this file (--all shows them)",
        str(every[-1]),
    ]
    flip(file, 300)
    flip(file, file.stat().st_size - 1)
    _, short, _ = call("verify", made / "step-2")
    _, long, _ = call("verify", made / "step-2", "--all")
    damages = json.loads(call("verify", made / "step-2", "--json")[1])["checkpoints"][0]["damages"]
    assert len(damages) == long.count(file.name) == 2 and short.count(file.name) == 1
    assert "and 1 more" in short
