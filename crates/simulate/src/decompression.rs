//! Decompresses log files. The format is recognized by the first bytes, and a file may consist of several parts, each
//! compressed on its own.

use std::io::{self, BufRead as _, BufReader, Read};

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
pub fn decompressed(file: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let mut reader = BufReader::with_capacity(128 << 10, file);
    let start = reader.fill_buf()?;
    Ok(match start {
        _ if start.starts_with(&GZIP_MAGIC) => Box::new(MultiGzDecoder::new(reader)),
        _ if start.starts_with(&ZSTD_MAGIC) => Box::new(ZstdReader::Between(reader)),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Box::new(MultiBzDecoder::new(reader)),
        _ if start.starts_with(&XZ_MAGIC) => Box::new(XzReader::new_mem_limit(reader, true, XZ_MEMORY_KIB)),
        _ => Box::new(reader),
    })
}

/// Decompresses a sequence of Zstandard frames.
enum ZstdReader<R: Read> {
    /// Before a frame.
    Between(BufReader<R>),
    Frame(Box<StreamingDecoder<BufReader<R>, FrameDecoder>>),
    AtEnd,
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            *self = match std::mem::replace(self, ZstdReader::AtEnd) {
                ZstdReader::AtEnd => return Ok(0),
                ZstdReader::Between(mut reader) => match reader.fill_buf()? {
                    [] => return Ok(0),
                    // A skippable frame, with its length.
                    [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                        let mut head = [0; 8];
                        reader.read_exact(&mut head)?;
                        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
                        io::copy(&mut (&mut reader).take(length.into()), &mut io::sink())?;
                        ZstdReader::Between(reader)
                    }
                    _ => {
                        let invalid = |error: FrameDecoderError| io::Error::new(io::ErrorKind::InvalidData, error);
                        ZstdReader::Frame(Box::new(StreamingDecoder::new(reader).map_err(invalid)?))
                    }
                },
                ZstdReader::Frame(mut frame) => match frame.read(out)? {
                    0 if !out.is_empty() => ZstdReader::Between(frame.into_inner()),
                    read => {
                        *self = ZstdReader::Frame(frame);
                        return Ok(read);
                    }
                },
            };
        }
    }
}
