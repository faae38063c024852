//! Decompresses log files. The format is recognized by the first bytes, and a file may consist of several parts, each
//! compressed on its own.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
/// Memory for the dictionary of a file of xz, in KiB: `xz -9` needs a quarter.
const XZ_MEMORY_KIB: u32 = 256 << 10;

/// The text of a file, which may be compressed with gzip, Zstandard, bzip2 or xz.
pub fn decompressed(mut file: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let start = first_bytes(&mut file, XZ_MAGIC.len())?;
    let reader = BufReader::with_capacity(128 << 10, Cursor::new(start.clone()).chain(file));
    Ok(match start.as_slice() {
        _ if start.starts_with(&GZIP_MAGIC) => Box::new(GzipReader::Member(Box::new(GzDecoder::new(reader)))),
        _ if start.starts_with(&ZSTD_MAGIC) || is_skippable(&start) => Box::new(ZstdReader::Between(reader)),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Box::new(MultiBzDecoder::new(reader)),
        _ if start.starts_with(&XZ_MAGIC) => Box::new(XzReader::new_mem_limit(reader, true, XZ_MEMORY_KIB)),
        _ => Box::new(reader),
    })
}

/// Whether these bytes begin a skippable frame of Zstandard, as `pzstd` writes before each frame.
fn is_skippable(start: &[u8]) -> bool {
    matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// Reads some bytes; fewer at the end only.
fn first_bytes(reader: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(count as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Decompresses a sequence of gzip members. Zeros may follow, as `gzip -d` accepts them: tapes have blocks of one size.
enum GzipReader<R: BufRead> {
    Member(Box<GzDecoder<R>>),
    AtEnd,
}

impl<R: BufRead> Read for GzipReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let GzipReader::Member(member) = self else { return Ok(0) };
            let read = member.read(out)?;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            let GzipReader::Member(member) = std::mem::replace(self, GzipReader::AtEnd) else { return Ok(0) };
            let mut reader = member.into_inner();
            if !skip_zeros(&mut reader)? {
                *self = GzipReader::Member(Box::new(GzDecoder::new(reader)));
            }
        }
    }
}

/// Skips bytes that are zero; whether the end follows.
fn skip_zeros(reader: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let buffer = reader.fill_buf()?;
        let (length, zeros) = (buffer.len(), buffer.iter().take_while(|byte| **byte == 0).count());
        reader.consume(zeros);
        if length == 0 || zeros < length {
            return Ok(length == 0);
        }
    }
}

/// A frame whose first bytes were read to recognize it.
type Frame<R> = Chain<Cursor<Vec<u8>>, R>;

/// Decompresses a sequence of Zstandard frames.
enum ZstdReader<R: Read> {
    /// Before a frame.
    Between(R),
    Frame(Box<StreamingDecoder<Frame<R>, FrameDecoder>>),
    AtEnd,
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            *self = match std::mem::replace(self, ZstdReader::AtEnd) {
                ZstdReader::AtEnd => return Ok(0),
                ZstdReader::Between(mut reader) => match first_bytes(&mut reader, ZSTD_MAGIC.len())? {
                    end if end.is_empty() => return Ok(0),
                    // A skippable frame, with its length.
                    magic if is_skippable(&magic) => {
                        let mut length = [0; 4];
                        reader.read_exact(&mut length)?;
                        let length = u32::from_le_bytes(length);
                        io::copy(&mut (&mut reader).take(length.into()), &mut io::sink())?;
                        ZstdReader::Between(reader)
                    }
                    magic => {
                        let invalid = |error: FrameDecoderError| io::Error::new(io::ErrorKind::InvalidData, error);
                        let frame = Cursor::new(magic).chain(reader);
                        ZstdReader::Frame(Box::new(StreamingDecoder::new(frame).map_err(invalid)?))
                    }
                },
                ZstdReader::Frame(mut frame) => match frame.read(out)? {
                    0 if !out.is_empty() => ZstdReader::Between(frame.into_inner().into_inner().1),
                    read => {
                        *self = ZstdReader::Frame(frame);
                        return Ok(read);
                    }
                },
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    /// Reads one byte at a time, as a pipe may.
    struct Bytes(Cursor<Vec<u8>>);

    impl Read for Bytes {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let length = out.len().min(1);
            self.0.read(&mut out[..length])
        }
    }

    #[test]
    fn formats_are_recognized_however_few_bytes_are_read_at_a_time() {
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, b'x', b'y', b'z'];
        let frame = |text: &str| compress_to_vec(text.as_bytes(), CompressionLevel::Fastest);
        let zstd = [frame("a log\n"), skipped.to_vec(), frame("of frames\n")].concat();
        let pzstd = [&skipped[..], &zstd].concat();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(b"a log\nof frames\n").unwrap();
        let gzip = gzip.finish().unwrap();
        let padded = [&gzip[..], &[0; 600]].concat();
        let members = [&padded[..], &gzip, &gzip, &[0]].concat();
        for (file, times) in
            [(b"a log\nof frames\n".to_vec(), 1), (gzip, 1), (padded, 1), (members, 3), (zstd, 1), (pzstd, 1)]
        {
            let mut text = String::new();
            decompressed(Bytes(Cursor::new(file))).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "a log\nof frames\n".repeat(times));
        }
    }

    #[test]
    fn other_bytes_behind_a_gzip_file_are_an_error() {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(b"a log\n").unwrap();
        let gzip = gzip.finish().unwrap();
        for rest in [&b"x"[..], b"\0x", &gzip[..2], &gzip[..gzip.len() - 1]] {
            let file = [&gzip[..], rest].concat();
            decompressed(Cursor::new(file)).unwrap().read_to_string(&mut String::new()).unwrap_err();
        }
    }
}
