"""Is everything that can be wrong with shards refused, in words that name the shard and the member?"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from shard_files import opened, png, samples, tar

from widefield.data import BadImageError
from widefield.data.shards import open_shards
from widefield.data.shards.index import make_index
from widefield.data.shards.index_files import shard_at


def refused(path: Path | str | None, **config) -> str:
    with pytest.raises(ValueError) as caught:
        opened(path, **{"hold_out": 0.5, **config})
    return str(caught.value)


def of(place: Path, members, **options) -> str:
    """The refusal of a tar of members; it names the tar."""
    path = tar(place / "a.tar", members)
    told = refused(path, options=options)
    assert str(path) in told, told
    return told


# ---------------------------------------------------------------------------------------------- the tar


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_with_long_names_and_other_alphabets_are_found(tmp_path, format):
    names = [f"{'folder/' * 30}käfer{number}" if format != tarfile.USTAR_FORMAT else f"a/{number}" for number in range(4)]
    members = [(f"{name}.{end}", data) for name in names for end, data in (("png", png(1)), ("cls", b"0"))]
    dataset = opened(tar(tmp_path / "a.tar", members, format=format), hold_out=0.5)
    found = [images.name_of(index) for images in (dataset.train, dataset.evaluate) for index in range(len(images))]
    assert sorted(found) == sorted(f"{tmp_path}/a.tar/{name}.png" for name in names)


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_refused_with_what_to_do(tmp_path, mode):
    path = tmp_path / "a.tar"
    with tarfile.open(path, f"w:{mode}") as file:
        file.addfile(tarfile.TarInfo("a.png"), io.BytesIO())
    told = refused(path)
    assert str(path) in told and "is compressed by" in told and "unpack it once (" in told
    path.rename(tmp_path / f"b.tar.{mode}")
    assert "b.tar." in refused(tmp_path) and "is compressed" in refused(tmp_path)


def test_a_tar_that_is_cut_short_anywhere_is_refused(tmp_path):
    """Python's tarfile takes one that ends between two members, or within a header, for a whole one."""
    path = tar(tmp_path / "a.tar", samples(range(3)))
    whole = path.read_bytes()
    end = max(member.start + -(-member.size // 512) * 512 for member in _members(path))
    for size in [*range(0, end, 64), end, end + 511]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short|is empty|damaged") as caught:
            make_index(path) if size else shard_at(path)
        assert str(path) in str(caught.value)
    path.write_bytes(whole[: end + 512])
    assert len(make_index(path)) == 3


def _members(path: Path):
    from widefield.data.shards.tar_members import members_of

    return list(members_of(path))


def test_a_block_of_zeros_or_of_noise_in_a_header_is_noticed(tmp_path):
    path = tar(tmp_path / "a.tar", samples(range(4)))
    whole = path.read_bytes()
    for member in _members(path):
        for block in (bytes(512), b"x" * 512):
            path.write_bytes(whole[: member.header] + block + whole[member.header + 512 :])
            with pytest.raises(ValueError, match="goes on behind the end|damaged") as caught:
                make_index(path)
            assert str(path) in str(caught.value)


def test_flipped_bytes_in_headers_are_named_or_change_names_alone(tmp_path):
    """300 damages; in half of them the checksum of the header is made right again, as if the tar had been written so."""
    path = tar(
        tmp_path / "a.tar", [(f"{'x' * 120}ä{name}", data) for name, data in samples(range(3))], format=tarfile.PAX_FORMAT
    )
    whole, random, refusals = path.read_bytes(), np.random.default_rng(0), 0
    members = _members(path)
    for number in range(300):
        member, content = members[int(random.integers(len(members)))], bytearray(whole)
        for place in random.integers(member.header, member.start, 3).tolist():
            content[place] ^= int(random.integers(1, 256))
        if number % 2:
            block = content[member.start - 512 : member.start]
            content[member.start - 364 : member.start - 356] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:]))
        path.write_bytes(content)
        try:
            assert [one.size for one in _members(path)] == [one.size for one in members] or number % 2
        except ValueError as error:
            refusals += 1
            assert str(path) in str(error)
    assert refusals > 150


def test_two_tars_in_one_file_are_noticed(tmp_path):
    one, two = (tar(tmp_path / f"{name}.tar", samples(keys)) for name, keys in (("a", range(3)), ("b", range(3, 6))))
    one.write_bytes(one.read_bytes() + two.read_bytes())
    told = refused(one)
    assert str(one) in told and "two tars in one file" in told and "tar --concatenate" in told


def test_links_sparse_files_and_devices_are_refused(tmp_path):
    for kind, words in (
        (tarfile.SYMTYPE, "is a link to b.png"),
        (tarfile.LNKTYPE, "is a link"),
        (tarfile.FIFOTYPE, "is no file"),
    ):
        path = tar(tmp_path / "a.tar", samples(range(2)))
        with tarfile.open(path, "a") as file:
            about = tarfile.TarInfo("a.png")
            about.type, about.linkname = kind, "b.png"
            file.addfile(about)
        told = refused(path)
        assert f"{path}: the member a.png {words}" in told


def test_folders_hidden_files_and_notes_are_no_samples(tmp_path):
    path = tar(tmp_path / "a.tar", [("README", b"x"), ("._0.png", b"x"), ("__info__/a.json", b"{}"), *samples(range(4))])
    with tarfile.open(path, "a") as file:
        about = tarfile.TarInfo("folder.d")
        about.type = tarfile.DIRTYPE
        file.addfile(about)
    assert len(make_index(path)) == 4 and make_index(path).others == 3


# ---------------------------------------------------------------------------------------------- samples


def test_samples_without_an_image_or_a_label_are_named(tmp_path):
    told = of(tmp_path / "image", [*samples(range(3)), ("x.cls", b"1"), ("y.cls", b"1")])
    assert "the sample x (its members are .cls) has no image, and so have 1 more samples of this shard" in told
    assert "the sample x has no label, as it has no .cls" in of(tmp_path / "label", [*samples(range(3)), ("x.png", png(0))])
    told = of(tmp_path / "mask", [("x.png", png(0)), ("x.mask.png", png(0)), ("y.png", png(0))])
    assert "the sample y (its members are .png) has no mask" in told
    told = of(tmp_path / "two", [("x.png", png(0)), ("x.jpg", png(0)), ("x.cls", b"0")])
    assert "has 2 members that may be its image; say which it is: data.options.image=png" in told
    assert "of .nii.gz" not in told
    told = of(tmp_path / "volume", [("x.nii.gz", b"x"), ("x.cls", b"0")])
    assert "(its members are .nii.gz, .cls) has no image" in told


def test_two_samples_of_one_key_and_two_members_of_one_part_are_named(tmp_path):
    told = of(tmp_path / "far", [*samples(range(3)), ("000001.json", b"{}")])
    assert "two samples have the key 000001: 000001.png begins one, and 000001.json, behind other samples, a second" in told
    told = of(tmp_path / "near", [("a.png", png(0)), ("a.PNG", png(1)), ("a.cls", b"0")])
    assert "the members a.png and a.PNG are one part of one sample" in told


def test_an_unsorted_tar_says_how_to_sort_it(tmp_path):
    told = of(tmp_path, [("a.png", png(0)), ("b.png", png(0)), ("a.cls", b"0"), ("b.cls", b"0")])
    assert "tar --sort=name" in told


def test_a_tar_without_samples_is_named(tmp_path):
    assert "holds no samples: none of its 1 files is named as KEY.EXTENSION" in of(tmp_path, [("README", b"x")])


LABELS = {
    "empty": ("cls", ["0", " ", "1", "1"], {}, "a.tar/1.cls holds nothing where a label is wanted"),
    "lines": ("cls", ["0", "1\n2", "1", "1"], {}, "a.tar/1.cls has 2 lines, and one label is wanted"),
    "bytes": ("cls", ["0", "\udcff", "1", "1"], {}, "a.tar/1.cls is no text in UTF-8"),
    "mixed": ("cls", ["0", "cat", "1", "1"], {}, "labels are numbers and names: 0 of"),
    "below": ("cls", ["0", "-1", "1", "1"], {}, "and -1 of"),
    "object": ("cls", ["0", "100000", "1", "1"], {}, "1.png has the label 100000, which looks like the number of an object"),
    "unknown": ("cls", ["cat", "dgo", "dog", "cat"], {"classes": ["cat", "dog"]}, "1.png has the label dgo, and data.options."),
    "high": ("cls", ["0", "2", "1", "1"], {"classes": ["cat", "dog"]}, "1.png has the label 2, and data.options.classes has 2"),
    "twice": ("cls", ["0", "1", "1", "1"], {"classes": ["cat", "cat"]}, "has 'cat' twice"),
    "no list": ("cls", ["0", "1", "1", "1"], {"classes": 3}, "data.options.classes is 3; give names"),
    "no file": ("cls", ["0", "1", "1", "1"], {"classes": "none.txt"}, "there is no file"),
    "no json": ("json", ["{}", "{", "{}", "{}"], {"label": "json.a"}, "0.json has no key a; it has: none"),
    "torn json": ("json", ['{"a": 1}', "{", "{}", "{}"], {"label": "json.a"}, "1.json is no JSON"),
    "no key": ("json", ['{"b": {"c": 1}}'] * 4, {"label": "json.b.d"}, "0.json has no key b.d; it has: c"),
    "keys": ("json", ['{"b": 1, "c": 1}'] * 4, {"label": "json"}, "0.json holds several values there; name one key of: b, c"),
    "list": ("json", ['{"b": [1]}'] * 4, {"label": "json.b"}, "0.json holds a list where a label is wanted"),
    "null": ("json", ['{"b": null}'] * 4, {"label": "json.b"}, "0.json holds nothing where a label is wanted"),
    "deep": ("json", ['{"b": 1}'] * 4, {"label": "json.b.c"}, "0.json has no key b.c; it has: 1"),
    "text key": ("cls", ["0", "1", "1", "1"], {"label": "cls.a"}, "0.cls is no .json, so it has no key a"),
    "number": ("txt", ["1", "nan", "1", "1"], {"values": ["txt"]}, "1.png has the value 'nan'; a finite number is wanted"),
    "no value": ("txt", ["1", "x", "1", "1"], {"values": "txt"}, "1.png has the value 'x'; a finite number is wanted"),
    "no values": ("txt", ["1", "1", "1", "1"], {"values": []}, "data.options.values is an empty list"),
    "extension": ("cls", ["0", "1", "1", "1"], {"label": "class"}, "no member has this extension; they have: png, cls"),
    "unclear": ("txt", ["0", "1", "1", "1"], {}, "no member of {path} is known to be a label"),
    "kinds": ("cls", ["0", "1", "1", "1"], {"label": "cls", "values": "cls"}, "data.options has label and values"),
    "channels": ("cls", ["0", "1", "0", "1"], {"channels": 0}, "data.options.channels is 0"),
    "dtype": ("cls", ["0", "1", "0", "1"], {"dtype": "int8"}, "data.options.dtype is 'int8'"),
    "shuffle": ("cls", ["0", "1", "0", "1"], {"shuffle": {"block": 0, "blocks": 2}}, "data.options.shuffle is {'block': 0"),
    "shuffling": ("cls", ["0", "1", "0", "1"], {"shuffle": 3}, "data.options.shuffle is 3; write {block: 256"),
    "group": ("cls", ["0", "1", "0", "1"], {"group": "[a-z]"}, "the name '0' does not match it"),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_labels_and_options_that_are_wrong_are_named(tmp_path, name):
    extension, texts, options, words = LABELS[name]
    members = [
        (f"{number}.{end}", data)
        for number, text in enumerate(texts)
        for end, data in (("png", png(number)), (extension, text.encode("utf-8", "surrogateescape")))
    ]
    path = tar(tmp_path / "a.tar", members)
    assert words.replace("{path}", str(path)) in refused(path, options=options)


def test_texts_are_no_classes(tmp_path):
    members = [
        (f"{number}.{end}", data)
        for number in range(210)
        for end, data in (("png", b"x"), ("txt", f"a photo of number {number}!".encode()))
    ]
    assert "there are 210 different labels in 210 samples" in of(tmp_path, members, label="txt")


def test_a_class_that_none_to_train_on_has_is_named(tmp_path):
    for split, names in (("train", ("cat", "dog")), ("val", ("cat", "dgo"))):
        tar(tmp_path / f"{split}.tar", [(f"{name}.{end}", data) for name in names for end, data in
                                        (("png", png(1)), ("cls", name.encode()))])  # fmt: skip
    told = refused(tmp_path, hold_out=None)
    assert f"{tmp_path}/val.tar/dgo.png has the class 'dgo', which no sample to train on has; did you mean 'dog'?" in told
    assert opened(tmp_path, options={"classes": ["cat", "dog", "dgo"]}).classes == ["cat", "dog", "dgo"]


@pytest.mark.parametrize("content", [b"", png(0)[:60], b"no image"], ids=["empty", "torn", "text"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, content):
    path = tar(
        tmp_path / "train.tar", [*samples(range(3)), ("x.png", content), ("x.cls", b"0"), ("y.tif", content), ("y.cls", b"0")]
    )
    images = opened(path, options={"val": str(tar(tmp_path / "b.tar", samples(range(2))))}).train
    for index, name in ((3, "x.png"), (4, "y.tif")):
        with pytest.raises(BadImageError) as caught:
            images.read(index)
        told = str(caught.value)
        assert f"{path}/{name}" in told and "/tmp/widefield-" not in told
        assert name == "y.tif" or told.startswith(f"cannot read the image {path}/{name} ({len(content)} bytes; ")
        assert "object at" not in told


def test_a_wide_png_of_colours_is_refused_and_not_cut(tmp_path):
    cv2 = pytest.importorskip("imagecodecs")
    wide = cv2.png_encode(np.full((4, 5, 3), 300, dtype=np.uint16))
    told = of(tmp_path, [(f"{number}.{end}", data) for number in range(4) for end, data in (("png", wide), ("cls", b"0"))])
    assert "with 16 bits per channel, of which Pillow reads 8" in told


def test_a_volume_among_images_is_refused(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.zeros((9, 7, 8), np.uint8), metadata={"axes": "ZYX"})
    members = [*samples(range(3)), ("x.tif", buffer.getvalue()), ("x.cls", b"0")]
    path = tar(tmp_path / "train.tar", members)
    images = opened(path, options={"val": str(tar(tmp_path / "b.tar", samples(range(2))))}).train
    with pytest.raises(BadImageError, match=r"x\.tif has 3 dims, 9 x 7 x 8, and the first image to train on has 2"):
        images.read(3)


def test_a_shard_that_changes_while_it_is_used_is_noticed(tmp_path):
    path = tar(tmp_path / "train.tar", samples(range(6)))
    images = opened(path, hold_out=0.5).train
    images.read(0)
    open_shards._open.clear()
    tar(path, samples(range(9)))
    with pytest.raises(ValueError, match="has changed since it was indexed: it had") as caught:
        images.read(0)
    assert not isinstance(caught.value, BadImageError)  # which data.bad_images=skip would leave out
    images = opened(path, hold_out=0.5).train
    images.read(0)
    os.truncate(path, 600)
    with pytest.raises(ValueError, match="has changed since it was indexed: "):
        images.read(len(images) - 1)
    path.unlink()
    open_shards._open.clear()
    with pytest.raises(BadImageError, match=r"cannot read .*train\.tar/\[the png at byte \d+\] \(No such file"):
        images.read(0)
