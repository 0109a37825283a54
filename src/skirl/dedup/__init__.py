"""What repeats between samples: found in a batch, so that it is looked up once."""

from skirl.core.find import find as find
