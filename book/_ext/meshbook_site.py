"""Make the theme's pages whole: launch buttons that open, and no script twice."""

from pathlib import PurePosixPath


def notebook_url(config, pagename):
    """The address in Colab of the notebook generated from a chapter."""
    options = config.html_theme_options
    repository = options["repository_url"].removeprefix("https://github.com/")
    name = PurePosixPath(pagename).name
    return (
        f"{options['launch_buttons']['colab_url']}/github/{repository}"
        f"/blob/{options['repository_branch']}/notebooks/{name}.ipynb"
    )


def launch_notebook(app, pagename, templatename, context, doctree):
    """Point the Colab button at notebooks/, where Colab can open the chapter."""
    groups = [group.get("buttons", []) for group in context.get("header_buttons", [])]
    for button in sum(groups, []):
        if "colab" in button.get("url", ""):
            button["url"] = notebook_url(app.config, pagename)


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
