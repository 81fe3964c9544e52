"""Text: tokenized on whole windows without holding the GIL; arrays, text and bytes of any length padded to one."""

import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.formats.rows import Rows
from braidax.data.leaves import Flat, WrappingFlat, flat_of
from braidax.data.source import VARYING, Indices, Source, is_at_hand, loader_dtype, narrow
from braidax.data.transforms.text.ragged import Ragged, check_absent, check_varying, fields, lengths_of
from braidax.data.transforms.wrapping import Wrapping
from braidax.errors import ArgumentError, BraidaxError, FormatError, RecordError, import_extra
from braidax.spans import span

Encode = Callable[[list[str]], Sequence[Sequence[int] | NDArray[Any]]]
"""Turns texts into as many lists or arrays of token ids."""

TOKENS = "tokens"
_INT32 = np.dtype(np.int32)


def tokenized(
    source: Source,
    tokenizer: Any,
    *,
    leaf: str = "text",
    length: int | None = None,
    pad: int = 0,
    end: int | None = None,
) -> Source:
    """Returns a source whose text has become token ids, in the leaf `"tokens"`.

    **Arguments:** `source`: samples are mappings; `leaf` is text of varying size, which the tokens replace.
    `tokenizer`: a `tokenizers.Tokenizer`, a fast tokenizer of `transformers`, the path of a `tokenizer.json` or of its
    folder, or a function from a list of texts to as many lists or arrays of ids; it is called from many threads at
    once, for windows of any size, and the ids of a text must not depend on its neighbors. `length`: makes of the tokens
    an int32 `[length]`, cut behind its head or filled up with `pad`, and adds `"num_tokens"`, int32, which counts those
    that are none of the filling; None leaves int32 arrays of varying size. `end`: an id put behind every text.

    A tokenizer's own padding and truncation are not used; but with `length`, one of `tokenizers` cuts texts so that its
    special tokens are kept.

    **Raises:** `ArgumentError`, `FormatError` for a file that is no tokenizer, `MissingExtra`; while reading,
    `RecordError` naming a record that is no text or has no ids.
    """
    check_varying(source, leaf, needed_by="tokenized")
    check_absent(set(fields(source, needed_by="tokenized")) - {leaf}, [TOKENS], needed_by="tokenized")
    if length is not None and length < 1:
        raise ArgumentError(f"length={length}: expected at least 1 token; None leaves texts as long as they are")
    if end is not None and not 0 <= end < 2**31:
        raise ArgumentError(f"end={end}: expected the id of a token, between 0 and 2**31 - 1")
    encode, stamp = _encoder(tokenizer, length)
    tokens = _Tokenized(source, encode, leaf, end, stamp)
    if length is None:
        return tokens
    return _padded(tokens, length, Ragged(TOKENS, _INT32, _INT32), pad)


def padded(source: Source, length: int, *, leaf: str, pad: float = 0) -> Source:
    """Returns a source one of whose leaves has arrays of one length: longer ones are cut behind their head.

    Text becomes the bytes of its UTF-8, cut behind the last character that fits whole; bytes stay what they are. Of
    tables of Arrow and Parquet, lines of text, CSV, and bytes of TFRecord they are copied from where they lie, with no
    object of Python for a sample.

    **Arguments:** `source`: samples are mappings; `leaf` is text or bytes, which become uint8 `[length]`, or holds
    arrays `[any, ...]`, of one dtype and one shape behind the first dim, which become `[length, ...]`. The leaf
    `"num_" + leaf`, int32, is added: how many items (of text, bytes) of a sample are none of the filling. `pad`: what
    the rest is filled with.

    **Raises:** `ArgumentError`; `RecordError` naming a record of another dtype or shape than the first ones, or text
    that is no UTF-8: what is cut off is not looked at.
    """
    if length < 1:
        raise ArgumentError(f"length={length}: expected at least 1")
    check_varying(source, leaf, needed_by="padded")
    flat = flat_of(source, leaf)
    if flat is None:
        return _padded(source, length, Ragged.of(source, leaf, needed_by="padded", texts="as bytes"), pad)
    loaded = loader_dtype(flat.stored, where="padded", leaf=leaf)
    return _padded(source, length, Ragged(leaf, flat.stored, loaded, flat.shape, flat.kind), pad, flat)


def _padded(source: Source, length: int, ragged: Ragged, pad: float, flat: Flat | None = None) -> Source:
    blank = np.empty((length, *ragged.shape), ragged.loaded)
    try:
        blank[...] = pad
        fits = bool((blank == pad).all()) or blank.dtype.kind not in "biu"
    except OverflowError:
        fits = False
    if not fits:
        raise ArgumentError(f"pad={pad!r} does not fit in {ragged.loaded}, the dtype of leaf {ragged.leaf!r}")
    check_absent(fields(source, needed_by="padded"), [f"num_{ragged.leaf}"], needed_by="padded")
    return _Padded(source, length, ragged, blank.astype(ragged.stored), flat)


@dataclass(frozen=True, eq=False)
class _Tokenized(Wrapping):
    encode: Encode
    leaf: str
    end: int | None
    encode_stamp: str | None

    @property
    def sample_spec(self) -> Any:
        return {**{name: spec for name, spec in self.source.sample_spec.items() if name != self.leaf}, TOKENS: VARYING}

    def read(self, indices: Indices, out: Any) -> None:
        texts = np.empty(len(indices), object)
        inner = {name: leaf for name, leaf in out.items() if name != TOKENS}
        self.source.read(indices, {**inner, self.leaf: texts})
        with span("decode", "tokenize"):
            target = out[TOKENS]
            for place, array in enumerate(self._encode(texts.tolist(), indices)):
                target[place] = array

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "tokenized": f"{self.leaf} by {_name(self.encode)}"}

    @property
    def own_stamp(self) -> str | None:
        return self.encode_stamp and f"tokenized {self.leaf} {self.end} {self.encode_stamp}"

    def _encode(self, texts: list[Any], indices: Indices) -> list[NDArray[np.int32]]:
        for index, text in zip(indices.tolist(), texts, strict=True):
            if type(text) is not str:
                raise RecordError(
                    f"record {index}: leaf {self.leaf!r} is {type(text).__name__} {repr(text)[:40]}; expected str: "
                    "decode it with transform="
                )
        try:
            ids = self.encode(texts) if texts else []
        except BraidaxError:
            raise
        except Exception as error:
            raise RecordError(
                f"tokenizer={_name(self.encode)} raised {type(error).__name__}: {error}, on "
                f"{self._first_failing(texts, indices)}; mend the tokenizer or the record"
            ) from error
        if len(ids) != len(texts):
            raise RecordError(
                f"tokenizer={_name(self.encode)} returned {len(ids)} lists of ids for {len(texts)} texts; expected as "
                "many"
            )
        arrays = [_id_array(found, index) for index, found in zip(indices.tolist(), ids, strict=True)]
        return arrays if self.end is None else _ended(arrays, self.end)

    def _first_failing(self, texts: list[str], indices: Indices) -> str:
        for index, text in zip(indices.tolist(), texts, strict=True):
            try:
                self.encode([text])
            except Exception:  # noqa: BLE001 (the caller raises the first error)
                return f"record {index}"
        return f"the records {indices[:8].tolist()}{' …' if len(indices) > 8 else ''} taken together"


def _id_array(found: Any, index: int) -> NDArray[np.int32]:
    """Returns the ids of one text as int32 `[any]`."""
    try:
        array: NDArray[Any] = np.asarray(found)
    except ValueError:
        array = np.empty((0, 0))
    fine = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not fine or (array.size and array.itemsize >= 4 and not -(2**31) <= array.min() <= array.max() < 2**31):
        raise RecordError(
            f"record {index}: tokenizer= returned {type(found).__name__} {repr(found)[:40]} for it; expected a list or "
            "a one-dimensional array of ids that fit in int32"
        )
    return array.astype(_INT32, copy=False)


def _ended(arrays: list[NDArray[np.int32]], end: int) -> list[NDArray[np.int32]]:
    """Returns the ids of all texts with one more behind each."""
    last = np.array([end], _INT32)
    joined = np.concatenate([np.empty(0, _INT32), *(part for array in arrays for part in (array, last))])
    borders = np.cumsum([0, *(len(array) + 1 for array in arrays)]).tolist()
    return [joined[start:stop] for start, stop in itertools.pairwise(borders)]


@dataclass(frozen=True, eq=False, repr=False)
class _Padded(Wrapping, WrappingFlat):
    length: int
    ragged: Ragged
    blank: NDArray[Any]
    flat: Flat | None

    @property
    def sample_spec(self) -> Any:
        shape = (self.length, *self.ragged.shape)
        return {
            **self.source.sample_spec,
            self.ragged.leaf: jax.ShapeDtypeStruct(shape, self.ragged.loaded),
            f"num_{self.ragged.leaf}": jax.ShapeDtypeStruct((), _INT32),
        }

    @property
    def is_at_hand(self) -> bool:
        """Whether reads of the source inside are mere copies now, also of the values that fill the rows."""
        return self.flat is not None and is_at_hand(self.source)

    def read(self, indices: Indices, out: Any) -> None:
        leaf, count = self.ragged.leaf, f"num_{self.ragged.leaf}"
        inner = {name: array for name, array in out.items() if name not in (leaf, count)}
        if self.flat is not None:
            self._read_flat(self.flat, indices, out, inner)
            return
        varying = np.empty(len(indices), object)
        self.source.read(indices, {**inner, leaf: varying})
        with span("decode", "pad", num_bytes=out[leaf].nbytes):
            if self.ragged.kind != "numbers":
                rows = Rows.of(Flat(self.ragged.kind, self.ragged.stored), out[leaf], self.blank)
                self.ragged.fill(varying, rows, indices)
                np.copyto(out[count], rows.held, casting="same_kind")
                return
            parts: list[NDArray[Any]] = []
            for array in self.ragged.arrays(varying, indices):
                head = array[: self.length]
                parts += (head, self.blank[len(head) :])
            self.ragged.join(parts, out[leaf], indices)
            np.minimum(lengths_of(varying), self.length, out=out[count], casting="same_kind")

    def _read_flat(self, flat: Flat, indices: Indices, out: Any, inner: Mapping[str, Any]) -> None:
        """Has the source fill the rows; numbers that JAX has in fewer bits go there by way of an array of their own."""
        leaf, target = self.ragged.leaf, out[self.ragged.leaf]
        values = target if target.dtype == flat.stored else np.empty(target.shape, flat.stored)
        rows = Rows.of(flat, values, self.blank)
        self.source.read(indices, {**inner, leaf: rows})
        np.floor_divide(rows.held, flat.item_bytes, out=out[f"num_{leaf}"], casting="same_kind")
        if values is target:
            return
        try:
            narrow(values, target, indices, where="source", leaf=leaf)
        except RecordError:
            self.source.read(indices, {**inner, leaf: np.empty(len(indices), object)})  # which names the file
            raise

    def describe(self) -> Mapping[str, str]:
        unit = "" if self.ragged.kind == "numbers" else " bytes"
        return {**self.source.describe(), "padded": f"{self.ragged.leaf} to {self.length}{unit}"}

    @property
    def own_stamp(self) -> str | None:
        return f"padded {self.ragged.leaf} {self.length} {self.blank.ravel()[:1]}"


@dataclass(frozen=True)
class _HuggingFace:
    """A tokenizer of Hugging Face: a whole window in one call, which drops the GIL and spreads over its own threads.

    With two or three reading threads on two cores that takes as long as one thread a call does, which
    `TOKENIZERS_PARALLELISM=false` would ask for: the variable is left to the user.
    """

    tokenizer: Any

    def __call__(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return [np.array(encoding.ids, _INT32) for encoding in self.tokenizer.encode_batch_fast(texts)]


def _encoder(tokenizer: Any, length: int | None) -> tuple[Encode, str | None]:
    """Returns the function that encodes and, where it can be known, what becomes another when its ids do."""
    own = None
    if isinstance(tokenizer, str | os.PathLike):
        own = _load(Path(cast("str | os.PathLike[str]", tokenizer)))
    elif hasattr(given := getattr(tokenizer, "backend_tokenizer", tokenizer), "encode_batch_fast"):
        own = _copied(given)
    if own is None:
        if not callable(tokenizer):
            raise ArgumentError(
                f"tokenizer={type(tokenizer).__name__}: expected a tokenizers.Tokenizer (0.21 or newer), the path of a "
                "tokenizer.json, or a function from a list of texts to lists of ids: pass its method that encodes many"
            )
        return cast("Encode", tokenizer), None
    own.no_padding()
    own.no_truncation()
    if length is not None:
        num_special = own.num_special_tokens_to_add(False)
        if length <= num_special:
            raise ArgumentError(
                f"length={length}: this tokenizer adds {num_special} special tokens to every text; give a larger length"
            )
        own.enable_truncation(max_length=length)
    return _HuggingFace(own), xxhash.xxh3_128_hexdigest(own.to_str().encode())


def _load(path: Path) -> Any:
    tokenizers = import_extra("tokenizers", "text", purpose="reading a tokenizer.json")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise FormatError(
            f"{file}: no tokenizer can be loaded from it ({error}); expected the tokenizer.json that Tokenizer.save "
            "wrote"
        ) from error


def _copied(tokenizer: Any) -> Any:
    """Returns a copy, which nobody else can switch padding or truncation on in."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception as error:
        raise ArgumentError(
            f"tokenizer={type(tokenizer).__name__}: cannot be copied, as those with parts written in Python cannot "
            f"({error}); pass a function instead, from a list of texts to lists of ids, that calls its encode_batch"
        ) from error


def _name(encode: Any) -> str:
    return getattr(encode, "__qualname__", None) or type(encode).__name__.removeprefix("_")
