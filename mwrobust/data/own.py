"""Loads the user's own data: an .npz file, or folders of image files."""

import pathlib

import numpy as np

from mwrobust.data.arrays import Split, make_split, stack
from mwrobust.data.order import permutation
from mwrobust.errors import UserError
from mwrobust.runtime.archives import read_npz

# The names of the arrays in an .npz file: ours and those of Keras.
ARRAYS = (
  ('train_images', 'train_labels', 'test_images', 'test_labels'),
  ('x_train', 'y_train', 'x_test', 'y_test'),
)
IMAGE_FILES = (
  *('.png', '.jpg', '.jpeg', '.bmp', '.gif', '.webp'),
  *('.tif', '.tiff', '.ppm', '.pgm'),
)


def locate(name: str, directory: str) -> pathlib.Path:
  """Returns the path; a relative one starts from the directory, if given."""
  path = pathlib.Path(name).expanduser()
  return pathlib.Path(directory).expanduser() / path


def load(path: pathlib.Path, source: str) -> tuple[Split, Split]:
  """Loads the training and the test examples of an .npz file or a folder."""
  if path.is_dir():
    return _load_folder(path, source)
  if path.suffix != '.npz':
    raise UserError(
      f'{source} is neither a folder nor an .npz file: it must be a folder '
      'with train/CLASS/*.png and test/CLASS/*.png, or a file written by '
      'numpy.savez.'
    )
  return _load_npz(path, source)


def _load_npz(path: pathlib.Path, source: str) -> tuple[Split, Split]:
  train_images, train_labels, test_images, test_labels = read_npz(
    path, ARRAYS, source
  )
  return (
    make_split(train_images, train_labels, f'{source} (train)'),
    make_split(test_images, test_labels, f'{source} (test)'),
  )


def _load_folder(folder: pathlib.Path, source: str) -> tuple[Split, Split]:
  parts = [_list_files(folder / part, source) for part in ('train', 'test')]
  classes = sorted(parts[0])
  unknown = sorted({*parts[1]} - {*classes})
  if unknown:
    raise UserError(
      f'{source} has the class {unknown[0]} in test, but not in train: the '
      f'classes of train are {", ".join(classes)}.'
    )
  examples = []  # Paths and labels, those of train first.
  for files in parts:
    pairs = [
      (path, label)
      for label, name in enumerate(classes)
      for path in files.get(name, [])
    ]
    # Shuffled, so that the first images are not all of the first class.
    order = permutation(len(pairs), seed=0, stream=0)
    examples += [pairs[i] for i in order]
  is_grey = []

  def named_images():
    for path, _ in examples:
      image, grey = _read_image(path, source)
      is_grey.append(grey)
      yield str(path.relative_to(folder)), image

  images = stack(named_images(), source)
  if all(is_grey):
    images = np.ascontiguousarray(images[..., :1])
  labels = [label for _, label in examples]
  count = sum(map(len, parts[0].values()))
  return (
    make_split(images[:count], labels[:count], f'{source} (train)'),
    make_split(images[count:], labels[count:], f'{source} (test)'),
  )


def _list_files(
  folder: pathlib.Path, source: str
) -> dict[str, list[pathlib.Path]]:
  """Returns the image files in each class's folder, sorted."""
  if not folder.is_dir():
    raise UserError(
      f'{source} has no folder {folder.name} in it: its images must be in '
      'train/CLASS/ and test/CLASS/.'
    )
  found = {}
  for path in sorted(folder.iterdir()):
    if path.is_dir() and not path.name.startswith('.'):
      found[path.name] = sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in IMAGE_FILES and file.name[0] != '.'
      )
      if not found[path.name]:
        raise UserError(
          f'{source} has no images in {folder.name}/{path.name}: put files '
          f'there that end with {", ".join(IMAGE_FILES)}, or remove it.'
        )
  if not found:
    raise UserError(
      f'{source} has no labels: there are no folders in {folder.name}. Put the '
      f'images of each class into {folder.name}/CLASS/.'
    )
  return found


def _read_image(path: pathlib.Path, source: str) -> tuple[np.ndarray, bool]:
  """Returns the image, uint8 [H, W, 3], and whether it is grey."""
  from PIL import Image

  try:
    with Image.open(path) as image:
      mode = image.mode
      pixels = np.asarray(image.convert('RGB'))
  except Exception as error:  # Pillow's decoders raise many kinds.
    raise UserError(
      f'{source}: the image {path} cannot be read ({error}).'
    ) from error
  if mode.startswith(('I', 'F')):  # Pillow would clip them at 255.
    raise UserError(
      f'{source}: the image {path} has more than 8 bits per pixel. Save it as '
      '8-bit grey or RGB.'
    )
  return pixels, mode in ('1', 'L', 'LA')
