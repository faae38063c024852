//! Decompresses log files. The format is recognized by the first bytes, and a file may consist of several parts, each
//! compressed on its own.

use std::io::{self, BufReader, Chain, Cursor, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
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
        _ if start.starts_with(&GZIP_MAGIC) => Box::new(MultiGzDecoder::new(reader)),
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
        for file in [b"a log\nof frames\n".to_vec(), gzip.finish().unwrap(), zstd, pzstd] {
            let mut text = String::new();
            decompressed(Bytes(Cursor::new(file))).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "a log\nof frames\n");
        }
    }
}
