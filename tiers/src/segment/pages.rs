//! Page-aligned memory for direct I/O, without unsafe code.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::PAGE;

/// Zeroed bytes whose first one lies on a page boundary.
pub(crate) struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Room for `pages` pages.
    pub(crate) fn new(pages: usize) -> Pages {
        let len = pages * PAGE;
        let bytes = vec![0; len + PAGE];
        // The vector never grows, so its memory stays where it is.
        let start = (PAGE - bytes.as_ptr().addr() % PAGE) % PAGE;
        Pages { bytes, start, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.start + self.len).unwrap_or_default()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }

    /// Reads `count` pages at `offset` to page `first` of this memory and those behind it. Returns
    /// the number of whole pages read: fewer than asked where the file ends.
    pub(crate) fn read(
        &mut self,
        file: &File,
        offset: u64,
        first: usize,
        count: usize,
    ) -> io::Result<usize> {
        let whole = first * PAGE..(first + count) * PAGE;
        let buffer = self.bytes_mut().get_mut(whole).unwrap_or_default();
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, offset + done as u64) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if !done.is_multiple_of(PAGE) {
                // The file ends inside a page; a direct read cannot go on from there.
                break;
            }
        }
        Ok(done / PAGE)
    }

    /// The page number `index` of what was read.
    pub(crate) fn page(&self, index: usize) -> Option<&[u8; PAGE]> {
        self.bytes().get(index * PAGE..(index + 1) * PAGE)?.try_into().ok()
    }
}
