"""A drawing as a PDF of one page, with the fonts that every reader has (PDF 1.7, ISO 32000-1, sections 7 to 9)."""

from braidax.pictures.drawing import LIGHT, Box, Drawing, Stroke, Words

_WIDTHS = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 "
    "584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 "
    "667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 "
    "278 556 500 722 500 500 500 334 260 334 584"
)
_HELVETICA = dict(zip(range(32, 127), map(int, _WIDTHS.split()), strict=True))
"""The widths of Helvetica's letters, in thousandths of its size, from the metrics that Adobe publishes."""

_BOLD_WIDER = 1.06
_REPLACED = str.maketrans({"−": "-", "∅": "0", "≤": "<", "≥": ">", "→": ">", "‑": "-"})


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Returns how wide a text is in Helvetica, in points."""
    units = sum(_HELVETICA.get(ord(letter), 556) for letter in text.translate(_REPLACED))
    return units / 1000 * size * (_BOLD_WIDER if is_bold else 1.0)


def to_pdf(drawing: Drawing) -> bytes:
    """Returns a drawing as a page of its size; what Helvetica has no letter for becomes a question mark."""
    lines = [f"{_color('back')} rg 0 0 {drawing.width:.2f} {drawing.height:.2f} re f"]
    for shape in drawing.shapes:
        match shape:
            case Box():
                y = drawing.height - shape.y - shape.height
                lines.append(
                    f"{_color(shape.role, shape.opacity)} rg {shape.x:.2f} {y:.2f} {shape.width:.2f} "
                    f"{shape.height:.2f} re f"
                )
            case Stroke():
                ends = (shape.x, drawing.height - shape.y, shape.to_x, drawing.height - shape.to_y)
                lines.append(
                    f"{_color(shape.role)} RG {shape.width:g} w {ends[0]:.2f} {ends[1]:.2f} m {ends[2]:.2f} "
                    f"{ends[3]:.2f} l S"
                )
            case Words():
                lines.append(_words(shape, drawing.height))
    return _document(drawing, "\n".join(lines).encode("cp1252"))


def _words(words: Words, height: float) -> str:
    width = text_width(words.text, words.size, is_bold=words.is_bold)
    x = words.x - {"start": 0.0, "middle": width / 2, "end": width}[words.anchor]
    text = words.text.translate(_REPLACED).encode("cp1252", "replace").decode("cp1252")
    text = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    font = "/B" if words.is_bold else "/R"
    return f"BT {_color(words.role)} rg {font} {words.size:g} Tf {x:.2f} {height - words.y:.2f} Td ({text}) Tj ET"


def _color(role: str, opacity: float = 1.0) -> str:
    """Returns a color as it looks on the paper."""
    paper = LIGHT["back"]
    parts = [
        opacity * int(LIGHT[role][at : at + 2], 16) + (1 - opacity) * int(paper[at : at + 2], 16) for at in (1, 3, 5)
    ]
    return " ".join(f"{part / 255:.3f}" for part in parts)


def _document(drawing: Drawing, content: bytes) -> bytes:
    title = drawing.title.translate(_REPLACED).encode("cp1252", "replace")
    for mark in (b"\\", b"(", b")"):
        title = title.replace(mark, b"\\" + mark)
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /{} /Encoding /WinAnsiEncoding >>"
    page = (
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {drawing.width:.2f} {drawing.height:.2f}] /Contents 4 0 R "
        "/Resources << /Font << /R 5 0 R /B 6 0 R >> >> >>"
    )
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        page.encode(),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        font.format("Helvetica").encode(),
        font.format("Helvetica-Bold").encode(),
        b"<< /Title (%s) /Producer (braidax) >>" % title,
    ]
    data, places = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), list[int]()
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R /Info 7 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    )
    data += end % (len(objects) + 1, table, len(objects) + 1, len(data))
    return bytes(data)
