"""Make the theme's pages whole: launch buttons that open, and no script twice."""

from pathlib import Path, PurePosixPath

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def notebook_url(options, name):
    """The address in Colab of the notebook generated from a chapter."""
    repository = options["repository_url"].removeprefix("https://github.com/")
    return (
        f"{options['launch_buttons']['colab_url']}/github/{repository}"
        f"/blob/{options['repository_branch']}/notebooks/{name}.ipynb"
    )


def launch_notebook(app, pagename, templatename, context, doctree):
    """Point the Colab button at notebooks/, where Colab can open the chapter.

    The theme's own address is that of the Markdown, which Colab cannot open. A page
    without a notebook, such as the status of the build, has no button.
    """
    name = PurePosixPath(pagename).name
    buttons = context.get("header_buttons", [])
    if (NOTEBOOKS / f"{name}.ipynb").exists():
        for button in sum((group.get("buttons", []) for group in buttons), []):
            if "colab" in button.get("url", ""):
                button["url"] = notebook_url(app.config.html_theme_options, name)
    else:
        context["header_buttons"] = [
            group for group in buttons if group.get("label") != "launch-buttons"
        ]


def drop_thebe(app, pagename, templatename, context, doctree):
    """Leave out Thebe: the book does not use it, and it is declared twice."""
    context["script_files"] = [
        script for script in context.get("script_files", [])
        if "thebe" not in f"{getattr(script, 'filename', script)}".lower()
        and "THEBE" not in getattr(script, "attributes", {}).get("body", "")
    ]


def setup(app):
    """Register with Sphinx, after the theme."""
    app.connect("html-page-context", launch_notebook, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
