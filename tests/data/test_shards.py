"""Is a dataset of shards what a folder of the same files is, read once an epoch by any ranks and workers?"""

import doctest
import io
import json
import multiprocessing
import os
import pickle
import signal
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from command import losses, run, start, wait_for_step
from PIL import Image
from shard_files import of_folder, opened, png, same_images, samples, tar

from widefield.config import DataConfig
from widefield.data import Dataset, order
from widefield.data.image import read_image
from widefield.data.loader import load_batches, reader_of
from widefield.data.order import ShuffleBlocks, Steps, TrainSampler, order_of
from widefield.data.shards import index_files, indexing, labels, member_kinds, open_shards, patterns, tar_members

CPU = torch.device("cpu")
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def content(images) -> list[tuple]:
    """Every image and target, in order."""
    read = [images.read(index) for index in range(len(images))]
    return [(image.numpy().tobytes(), image.shape, image.dtype, target) for image, target in read]


def batches_of(dataset: Dataset, *, ranks: int, workers: int, first: int = 0, epochs: int = 1) -> list[list]:
    """For each rank its batches of epochs: (index, pixels, target, seed) of each sample."""
    steps, config = Steps(len(dataset.train), 4), DataConfig(name="webdataset", augment=["RandomHorizontalFlip"])
    reader, found = reader_of(config, dataset.train, num_classes=3, seed=5, train=True, device=CPU), []
    for rank in range(ranks):
        about = {"rank": rank, "ranks": ranks, "passes": 1, "multiple": 1, "blocks": getattr(dataset.train, "blocks", None)}
        sampler = TrainSampler(steps, seed=5, first=first, last=epochs * steps.per_epoch, **about)
        own = []
        for batch in load_batches(reader, sampler, workers=workers, device=CPU):
            assert batch.problem is None, batch.problem
            rows = range(batch.samples)
            own.append(
                [
                    (int(batch.index[row]), batch.image[row].numpy().tobytes(), int(batch.target[row]), batch.seeds[row])
                    for row in rows
                ]
            )
        found.append(own)
    return found


def together(of_ranks: list[list]) -> list[list]:
    """What all ranks read at each step, in the order of ranks."""
    return [[sample for part in parts for sample in part] for parts in zip(*of_ranks, strict=True)]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    return same_images(tmp_path_factory.mktemp("same"))


def test_the_examples_in_the_docstrings_hold():
    results = [doctest.testmod(module) for module in (tar_members, patterns, member_kinds, labels)]
    assert sum(result.failed for result in results) == 0 and sum(result.attempted for result in results) == 6


# ---------------------------------------------------------------------------------------------- as a folder


def test_shards_give_what_a_folder_of_the_same_files_gives(both):
    one, other = of_folder(both[0]), opened(both[1])
    assert other.classes == one.classes == ["ant", "bee"] and (other.channels, other.mean) == (one.channels, one.mean)
    for split in ("train", "evaluate"):
        assert content(getattr(other, split)) == content(getattr(one, split))
    assert "14 images to train on, 5 to evaluate" in other.about and "4 shards" in other.about


@FORKS
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("options", [{}, {"shuffle": {"block": 2, "blocks": 3}}], ids=["anywhere", "by blocks"])
def test_every_sample_is_read_once_an_epoch_and_each_step_is_that_of_one_rank(both, ranks, workers, options):
    """14 samples in steps of 4 on 3 ranks: parts are uneven, and some empty."""
    alone = together(batches_of(opened(both[1], options=options), ranks=1, workers=0, epochs=2))
    found = together(batches_of(opened(both[1], options=options), ranks=ranks, workers=workers, epochs=2))
    assert found == alone
    for epoch in (alone[:4], alone[4:]):
        assert sorted(sample[0] for step in epoch for sample in step) == list(range(14))
    if not options:
        assert alone == together(batches_of(of_folder(both[0]), ranks=1, workers=0, epochs=2))


@pytest.mark.parametrize("options", [{}, {"shuffle": {"block": 2, "blocks": 3}}], ids=["anywhere", "by blocks"])
def test_a_run_resumed_amid_an_epoch_reads_what_was_left(both, options):
    dataset = opened(both[1], options=options)
    whole = batches_of(dataset, ranks=2, workers=0, epochs=3)
    left = batches_of(opened(both[1], options=options), ranks=2, workers=0, first=6, epochs=3)
    assert left == [own[6:] for own in whole]


EXACT = ["precision=float64", "model.name=resnet", "model.options={widths: [4, 8], blocks: 1}", "data.batch_size=4",
         "optimizer.lr=0.01", "schedule.length=60step", "evaluate.every=60step",
         "data.augment=[RandomHorizontalFlip]"]  # fmt: skip


@pytest.mark.long
@pytest.mark.alone
def test_losses_are_those_of_a_folder_on_any_ranks_and_after_a_stop(both, tmp_path):
    """To the bit on one rank; on three, sums of float64 in another order."""

    def recipe(name: str, path: Path, *more: str) -> list[str]:
        return ["train", "digits", f"data.name={name}", f"data.path={path}", *EXACT, *more]

    run(*recipe("imagefolder", both[0], "data.workers=0"), "--run", tmp_path / "folder")
    wanted = losses(tmp_path / "folder")
    assert len(wanted) == 60
    alone = [*recipe("webdataset", both[1], "data.workers=1"), "--run", tmp_path / "alone"]
    process = start(*alone)
    wait_for_step(process, tmp_path / "alone", 5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert 5 <= len(losses(tmp_path / "alone")) < 60
    run(*alone)
    assert losses(tmp_path / "alone") == wanted
    run(*recipe("webdataset", both[1], "data.workers=0", "mesh.replicate=3"), "--run", tmp_path / "three")
    assert losses(tmp_path / "three") == pytest.approx(wanted, rel=0, abs=1e-9)


# ---------------------------------------------------------------------------------------------- pixels and labels


def encoded(suffix: str, pixels: np.ndarray | Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    if suffix == "npy":
        np.save(buffer, pixels)
    else:
        image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
        image.save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()), **options)
    return buffer.getvalue()


RGB = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
GREY, WIDE = RGB[..., 0], np.random.default_rng(1).integers(0, 2**16, (12, 10), dtype=np.uint16)
FLOAT = np.random.default_rng(2).normal(size=(5, 12, 10)).astype(np.float32)
TURNED = Image.Exif()
TURNED[0x0112] = 6
FILES = {
    "rgb.png": ("png", RGB, {}), "grey.png": ("png", GREY, {}), "wide.png": ("png", WIDE, {}), "rgb.jpg": ("jpg", RGB, {}),
    "turned.jpg": ("jpg", RGB, {"exif": TURNED}), "rgb.webp": ("webp", RGB, {}), "rgb.bmp": ("bmp", RGB, {}),
    "rgb.tif": ("tif", RGB, {}), "wide.tif": ("tif", WIDE, {}), "bands.npy": ("npy", FLOAT, {}), "wide.npy": ("npy", WIDE, {}),
    "palette.png": ("png", Image.fromarray(RGB).quantize(16), {}), "bits.png": ("png", Image.fromarray(GREY > 99), {}),
    "cmyk.jpg": ("jpg", Image.fromarray(RGB).convert("CMYK"), {}), "turned.tif": ("tif", RGB, {"exif": TURNED}),
    "rgba.png": ("png", np.dstack([RGB, GREY]), {}), "mistaken.jpg": ("tif", RGB, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_an_image_in_a_shard_is_read_as_the_file_is(tmp_path, name):
    kind, pixels, options = FILES[name]
    file, suffix = encoded(kind, pixels, **options), name.partition(".")[2]
    (tmp_path / name).write_bytes(file)
    members = [(f"{number}.{end}", data) for number in range(4) for end, data in ((suffix, file), ("cls", b"0"))]
    dataset = opened(tar(tmp_path / "a.tar", members), hold_out=0.5, options={"channels": None})
    found, wanted = dataset.train.read(0)[0], read_image(tmp_path / name)
    assert torch.equal(found, wanted) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert (dataset.channels, dataset.dtype) == (len(wanted), wanted.dtype)


def test_the_spacing_of_a_tiff_is_told(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, GREY, resolution=(1e4, 2e4), resolutionunit="CENTIMETER")
    members = [(f"{number}.{end}", data) for number in range(4) for end, data in (("tif", buffer.getvalue()), ("cls", b"0"))]
    members += [(f"{number}.{end}", data) for number in (4, 5) for end, data in (("png", png(0)), ("cls", b"0"))]
    images = opened(tar(tmp_path / "train-0.tar", members), options={"val": str(tar(tmp_path / "b.tar", members))}).train
    assert images.spacing_of(0) == pytest.approx((0.0005, 0.001)) and images.spacing_of(5) is None  # millimetres


def labelled(place: Path, extension: str, texts: list[str], **options) -> Dataset:
    members = [
        (f"{number}.{end}", data)
        for number, text in enumerate(texts)
        for end, data in (("png", png(number)), (extension, text.encode()))
    ]
    return opened(tar(place / "a.tar", members), options=options, hold_out=0.5)


def every_target(dataset: Dataset) -> list:
    """By the number that a sample has as its key."""
    both = [(images, index) for images in (dataset.train, dataset.evaluate) for index in range(len(images))]
    targets = {int(Path(images.name_of(index)).stem): images.target_of(index) for images, index in both}
    return [targets[number] if isinstance(targets[number], int) else targets[number].tolist() for number in sorted(targets)]


def test_labels_of_every_kind(tmp_path):
    numbers = labelled(tmp_path / "numbers", "cls", ["0", "3\n", "003", "0"])
    assert numbers.classes == ["0", "1", "2", "3"] and every_target(numbers) == [
        0,
        3,
        3,
        0,
    ]  # a class nobody has keeps its number
    names = labelled(tmp_path / "names", "cls", ["dog", " cat ", "dog", "cat"])
    assert names.classes == ["cat", "dog"] and every_target(names) == [1, 0, 1, 0]
    given = labelled(tmp_path / "given", "cls", ["1", "0", "1", "0"], classes=["cat", "dog", "owl"])
    assert given.classes == ["cat", "dog", "owl"] and every_target(given) == [1, 0, 1, 0]
    texts = labelled(tmp_path / "texts", "txt", ["b", "a", "a", "b"], label="txt", classes=["b", "a"])
    assert every_target(texts) == [0, 1, 1, 0]
    rows = [json.dumps({"about": {"kind": kind}, "tags": tags, "age": age}) for kind, tags, age in (
        ("x", ["wet"], 1), ("y", [], 2.5), ("x", ["dry", "wet"], -3), ("y", ["dry"], 4e3)
    )]  # fmt: skip
    assert every_target(labelled(tmp_path / "key", "json", rows, label="json.about.kind")) == [0, 1, 0, 1]
    several = labelled(tmp_path / "tags", "json", rows, labels="json.tags")
    assert several.labels == "classes" and several.classes == ["dry", "wet"]
    assert every_target(several) == [[0, 1], [0, 0], [1, 1], [1, 0]]
    values = labelled(tmp_path / "age", "json", rows, values=["json.age"])
    assert (values.labels, values.classes) == ("values", ["json.age"])
    assert every_target(values) == [[1.0], [2.5], [-3.0], [4000.0]]
    listed = labelled(tmp_path / "listed", "txt", ["a;b", "", "b|c", "a\nc"], labels="txt")
    assert every_target(listed) == [[1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 1]]


def test_the_names_of_classes_may_be_in_a_file(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert labelled(tmp_path, "cls", ["1", "0", "1", "0"], classes="classes.txt").classes == ["cat", "dog"]


def test_masks_are_read_as_those_of_folders(tmp_path):
    marks = (np.arange(63) % 3).astype(np.uint8).reshape(7, 9)
    members = [
        (f"{number}.{end}", data)
        for number in range(4)
        for end, data in (("png", png(number)), ("mask.png", encoded("png", np.roll(marks, number))))
    ]
    dataset = opened(tar(tmp_path / "a.tar", members), hold_out=0.5)
    assert dataset.labels == "pixels" and dataset.classes == ["0", "1", "2"]
    number = int(Path(dataset.train.name_of(1)).stem)
    image, target = dataset.train.read(1)
    assert image.shape == (3, 7, 9) and np.array_equal(target.numpy(), np.roll(marks, number))
    named = opened(tmp_path / "a.tar", hold_out=0.5, options={"classes": {"sky": 0, "car": 2}, "ignore": 1})
    assert set(named.train.read(0)[1].unique().tolist()) == {0, 1, 255}
    with pytest.raises(ValueError, match=r"the mask .*a\.tar/\d\.mask\.png has the number 2 in 21 pixels"):
        opened(tmp_path / "a.tar", hold_out=0.5, options={"classes": ["sky", "car"]}).train.read(0)


# ---------------------------------------------------------------------------------------------- indexes


def test_an_index_is_made_once_and_again_when_the_shard_changes(tmp_path, monkeypatch):
    made, make = [], indexing.make_index
    monkeypatch.setattr(indexing, "make_index", lambda path: made.append(path) or make(path))
    path = tar(tmp_path / "a.tar", samples(range(6)))
    first = content(opened(path, hold_out=0.5).train)
    assert content(opened(path, hold_out=0.5).train) == first and len(made) == 1
    assert sorted(file.suffix for file in (tmp_path / ".widefield").iterdir()) == [".index", ".labels"]
    tar(path, samples(range(10, 16)))
    assert content(opened(path, hold_out=0.5).train) != first and len(made) == 2
    index = tmp_path / ".widefield/a.tar.index"
    whole = index.read_bytes()
    for damaged in (whole[:-1], whole[:200], whole[:-20] + b"x" + whole[-19:], b"", b"{}\n", whole + b"0"):
        index.write_bytes(damaged)
        before = len(made)
        assert len(opened(path, hold_out=0.5).train) == 3 and len(made) == before + 1


def test_a_shard_with_the_same_size_and_time_and_other_samples_is_noticed(tmp_path):
    path = tar(tmp_path / "a.tar", samples(range(6)))
    about = path.stat()
    opened(path, hold_out=0.5)
    tar(path, samples([*range(5), 8]))
    assert path.stat().st_size == about.st_size
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    found = opened(path, hold_out=0.5)
    assert any(
        "000008.png" in images.name_of(index) for images in (found.train, found.evaluate) for index in range(len(images))
    )


def test_where_nothing_can_be_written_beside_shards_the_users_cache_has_the_index(tmp_path, monkeypatch):
    path = tar(tmp_path / "shards/a.tar", samples(range(6)))
    (tmp_path / "shards/.widefield").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = content(opened(path, hold_out=0.5).train)
    assert len(list((tmp_path / "cache/widefield/shards").iterdir())) == 2
    monkeypatch.setattr(indexing, "make_index", lambda path: pytest.fail("indexed again"))
    assert content(opened(path, hold_out=0.5).train) == first
    monkeypatch.undo()
    monkeypatch.setattr(index_files, "_written", lambda place, content: False)
    assert content(opened(tar(tmp_path / "b/a.tar", samples(range(6))), hold_out=0.5).train) == first


def test_no_name_of_a_member_is_in_memory_and_none_is_read_for_a_split_by_shards(tmp_path):
    """22 million names would be gigabytes on every rank."""
    for split, keys in (("train", range(0, 300)), ("val", range(300, 310))):
        tar(tmp_path / f"{split}-0.tar", samples(keys))
    train = opened(tmp_path).train
    assert len(pickle.dumps(train)) < 300 * 60 + 4000
    assert b"000123" not in pickle.dumps(train) and train.name_of(123) == f"{tmp_path}/train-0.tar/000123.png"


# ---------------------------------------------------------------------------------------------- processes


def _read_by_child(images, queue) -> None:
    queue.put((list(open_shards._open), content(images)))


def test_handles_stay_with_their_process(both):
    images = opened(both[1]).train
    wanted = content(images)
    assert open_shards._open
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_read_by_child, args=(images, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert content(images) == wanted
    found = [queue.get() for _ in children]
    for child in children:
        child.join()
    assert found == [([], wanted)] * 2
    assert content(pickle.loads(pickle.dumps(images))) == wanted


def test_threads_read_at_the_same_time_while_handles_come_and_go(both, monkeypatch):
    monkeypatch.setattr(open_shards, "MOST_OPEN", 1)
    open_shards._open.clear()
    images = opened(both[1]).train
    wanted, wrong = content(images), []

    def read() -> None:
        for _ in range(10):
            wrong.extend([] if content(images) == wanted else [1])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(open_shards._open) == 1


def _index(folder: Path, queue) -> None:
    queue.put(sum(len(index) for _, index in indexing.indexed(sorted(folder.glob("*.tar")))))


def test_processes_that_index_at_the_same_time_all_get_whole_indexes(tmp_path):
    for number in range(12):
        tar(tmp_path / f"{number:02}.tar", samples(range(number * 20, number * 20 + 20)))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    running = [context.Process(target=_index, args=(tmp_path, queue)) for _ in range(3)]
    for process in running:
        process.start()
    assert [queue.get() for _ in running] == [240] * 3
    for process in running:
        process.join()
    assert sorted(file.suffix for file in (tmp_path / ".widefield").iterdir()) == [".index"] * 12


# ---------------------------------------------------------------------------------------------- order by blocks


def test_blocks_are_permuted_with_what_is_in_them_and_neighbours_stay_near():
    blocks = ShuffleBlocks(np.array([0, 8, 16, 21, 29, 37, 40]), mixed=2)
    first = order_of(3, 1, 40, blocks=blocks)
    assert torch.equal(first, order_of(3, 1, 40, blocks=blocks)) and sorted(first.tolist()) == list(range(40))
    assert not torch.equal(first, order_of(3, 2, 40, blocks=blocks))
    of = np.searchsorted(blocks.bounds, first.numpy(), side="right")
    places = [np.flatnonzero(of == number) for number in range(1, 7)]
    assert max(int(np.ptp(place)) for place in places) < 16  # two blocks of 8
    assert any((np.diff(first[place].numpy()) < 0).any() for place in places)
    every = order_of(3, 1, 40, blocks=ShuffleBlocks(blocks.bounds, mixed=6))
    assert sorted(every.tolist()) == list(range(40)) and doctest.testmod(order).failed == 0


def test_blocks_do_not_cross_shards(both):
    blocks = opened(both[1], options={"shuffle": {"block": 4, "blocks": 2}}).train.blocks
    assert blocks.bounds.tolist() == [0, 4, 5, 9, 11, 14]  # shards of 5, 6 and 3


def test_batches_come_in_the_order_of_the_sampler(both):
    dataset = opened(both[1])
    wanted = order_of(5, 0, 14).tolist()
    assert [sample[0] for step in islice(batches_of(dataset, ranks=1, workers=0)[0], 4) for sample in step] == wanted
