"""Many faults against proofs: which check catches which program, as a grid of dots."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

LEFT, STEP, PITCH, TOP = 182.0, 33.0, 15.0, 76.0  # pixels
SEVERAL, ALONE = svg.KINDS[2], svg.KINDS[1]


def draw_fault_grid(caught: Mapping[str, Sequence[str]], proofs: Sequence[str]):
    """Draw {fault: the proofs that caught it}: a row per fault, a column per proof.

    A large dot is a proof that failed, as it should; it has a colour of its own where no other
    proof caught the fault. Raises ValueError for a proof without a column.
    """
    unknown = {proof for by in caught.values() for proof in by} - set(proofs)
    if unknown:
        raise ValueError(f"expected proofs among {', '.join(proofs)}; found {sorted(unknown)}")
    x = {proof: LEFT + STEP * (at + 0.5) for at, proof in enumerate(proofs)}
    body, told = [], []
    for proof in proofs:
        turned = f"rotate(-45 {svg.number(x[proof])} {svg.number(TOP - 8)})"
        body.append(svg.text(x[proof], TOP - 8, proof, 11, "start", font_weight="600",
                             transform=turned))
    for row, (fault, by) in enumerate(caught.items()):
        y = TOP + PITCH * (row + 0.5)
        if row % 2 == 0:
            body.append(svg.rectangle(0, y - PITCH / 2, LEFT + STEP * len(proofs), PITCH,
                                      fill="#858585", fill_opacity=0.13))
        body.append(svg.text(2, y + 4, fault, 10.5, "start"))
        body += [_dot(x[proof], y, fault, proof, by) for proof in proofs]
        told.append(f"{fault}: {', '.join(by) or 'no proof'}")
    y = TOP + PITCH * len(caught) + 6
    squares, tall = svg.key({"caught": SEVERAL, "caught by this proof alone": ALONE}, LEFT + 200)
    body.append(svg.element("g", "".join(squares), transform=f"translate(2 {svg.number(y)})"))
    width = LEFT + STEP * len(proofs) + 34
    alt = f"Which proofs catch which of {len(caught)} programs. " + "; ".join(told)
    return svg.picture("".join(body), width, y + tall - 6, alt, shown=1.15 * width)


def _dot(x, y, fault, proof, by):
    if proof not in by:
        return svg.element("circle", cx=x, cy=y, r=1.5, fill="currentColor", fill_opacity=0.5)
    return svg.element("circle", cx=x, cy=y, r=5.5, fill=ALONE if len(by) == 1 else SEVERAL,
                       data_caught=f"{fault}|{proof}")
