"""Turn MyST Markdown into the plain Markdown that Colab and GitHub can show."""

import re

ADMONITIONS = {
    "admonition", "attention", "caution", "danger", "error", "hint",
    "important", "note", "seealso", "tip", "warning",
}
OPENING = re.compile(r"^(`{3,}|:{3,})(?:\{([\w:-]+)\})?(.*)$")
OPTION = re.compile(r"^:([\w-]+):\s*(.*)$")
ROLE = re.compile(r"\{([\w:]+)\}`([^`]+)`|`+[^`]+`+")
TARGET = re.compile(r"^(.*\S)\s*<([^<>]+)>$", re.DOTALL)
PAGE_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([\w-]+)\.md(#[\w-]+)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)")
DROPPED = re.compile(r"^(?:\([\w:-]+\)=|%.*)$")


def plain(text, links):
    """Return `text` without directives and roles.

    `links` knows addresses: its methods page, term, label, cite and file give the
    Markdown for a role or the address of a page. Raises ValueError for a directive or a
    role that has no plain form.
    """
    return "\n".join(_blocks(text.split("\n"), links)).strip("\n")


def _blocks(lines, links):
    """The lines of a text, each fenced block made plain."""
    out, prose = [], []
    rest = iter(lines)
    for line in rest:
        opening = OPENING.match(line)
        if not opening:
            prose.append(line)
            continue
        out += _prose(prose, links)
        prose = []
        fence, name, title = opening.groups()
        body = _until(fence, rest)
        out += _block(name, title.strip(), body, links) if name else [line, *body, fence]
    return out + _prose(prose, links)


def _until(fence, rest):
    """The lines up to the one that closes `fence`."""
    body = []
    for line in rest:
        if line.startswith(fence) and set(line.strip()) == {fence[0]}:
            return body
        body.append(line)
    raise ValueError(f"a block opened with {fence} is never closed")


def _block(name, title, body, links):
    """One directive as plain lines."""
    options, body = _options(body)
    if name in ("code-block", "code"):
        return [f"```{title}", *body, "```"]
    if name == "math":
        return ["$$", *body, "$$"]
    if name in ("figure", "image"):
        image = f"![{options.get('alt', '')}]({links.file(title)})"
        return [image, "", *_blocks(body, links)]
    if name not in ADMONITIONS | {"dropdown"}:
        raise ValueError(f"the directive {name} has no plain form")
    heading = _inline(title if name in ("admonition", "dropdown") else name.capitalize(), links)
    first = [title] if title and name not in ("admonition", "dropdown") else []
    inner = _blocks([*first, *body], links)
    if name == "dropdown" or "dropdown" in options.get("class", ""):
        return ["<details>", f"<summary>{heading}</summary>", "", *inner, "", "</details>"]
    return [f"> **{heading}**", ">", *[f"> {line}".rstrip() for line in inner]]


def _options(body):
    """The options that open a directive's body, and the rest of it."""
    options, count = {}, 0
    for line in body:
        if not (option := OPTION.match(line)):
            break
        options[option[1]] = option[2]
        count += 1
    return options, body[count:]


def _prose(lines, links):
    """Lines outside of fences, with links for roles; they may span lines."""
    if not lines:
        return []
    kept = [line for line in lines if not DROPPED.match(line)]
    return _inline("\n".join(kept), links).split("\n") if kept else []


def _inline(text, links):
    """A run of prose with its roles, page links and images made plain."""
    text = ROLE.sub(lambda found: _role(found, links), text)
    text = PAGE_LINK.sub(lambda m: f"[{m[1]}]({links.page(m[2])}{m[3] or ''})", text)
    return IMAGE.sub(lambda m: f"![{m[1]}]({links.file(m[2])})", text)


def _role(found, links):
    """One role, or a code span, which stays as it is."""
    name, content = found.groups()
    if name is None:
        return found[0]
    named = TARGET.match(content)
    text, target = named.groups() if named else (content, content)
    if name == "math":
        return f"${content}$"
    if name == "term":
        return links.term(text, target)
    if name in ("doc", "ref"):
        shown = text if named else None
        return (links.document if name == "doc" else links.label)(shown, target)
    if name in ("cite", "cite:p", "cite:t"):
        return links.cite(content, textual=name == "cite:t")
    raise ValueError(f"the role {name} has no plain form")
