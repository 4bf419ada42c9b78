"""A disk that loses power: what is on it at every moment, as far as fsync was asked for."""
import contextlib
import os
import pathlib
import shutil

LOST, KEPT = "names lost", "names kept"


class Disk:
    """A folder, and what a power cut leaves of it. Used as a context, in which os is watched.

    A file that was not synced since it was written is empty after the cut. What became of the
    names in a folder since it was synced is undone ("names lost") or done ("names kept"):
    file systems do either. images: (after what, which, folder) of every cut.
    """

    def __init__(self, folder, images):
        self.folder, self.room = pathlib.Path(folder), pathlib.Path(images)
        self.files, self.folders, self.held, self.images = {}, {}, [], []

    def __enter__(self):
        self.room.mkdir(parents=True)
        self.stack = contextlib.ExitStack()
        for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
            call = getattr(os, name)
            self.stack.callback(setattr, os, name, call)
            setattr(os, name, self.watch(name, call))
        return self

    def __exit__(self, *_):
        self.stack.close()
        for descriptor in self.held:
            os.close(descriptor)

    def watch(self, name, call):
        def watched(*what, **options):
            result = call(*what, **options)
            if name == "fsync":
                self.sync(*what)
            self.cut(f"{name} {what[0]}")
            return result

        return watched

    def sync(self, descriptor):
        """Remember the bytes of a file, or the names in a folder and what they name."""
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        inode = os.fstat(descriptor).st_ino
        self.held.append(os.open(path, os.O_RDONLY))  # so that no other file gets its number
        if path.is_dir():
            self.folders[inode] = {each.name: (each.inode(), each.is_dir())
                                   for each in os.scandir(path)}
        else:
            self.files[inode] = path.read_bytes()

    def cut(self, moment):
        """Write down what a power cut at this moment leaves, in both ways."""
        for which in (LOST, KEPT):
            image = self.room / str(len(self.images))
            image.mkdir()
            if which == LOST:
                self.write(image, self.folder.stat().st_ino)
            else:
                self.copy(image)
            self.images.append((moment, which, image))

    def write(self, path, inode):
        for name, (each, is_folder) in self.folders.get(inode, {}).items():
            if is_folder:
                (path / name).mkdir()
                self.write(path / name, each)
            else:
                (path / name).write_bytes(self.files.get(each, b""))

    def copy(self, image):
        def bytes_of(path, to):
            pathlib.Path(to).write_bytes(self.files.get(os.stat(path).st_ino, b""))

        shutil.copytree(self.folder, image, copy_function=bytes_of, dirs_exist_ok=True)
