//! Decodes the content codings of HTTP (RFC 9110, section 8.4.1; RFC 7932; RFC 9659) piece by piece, with bounded memory and CPU time
//! for each byte that arrives. The memory of all decoders is bounded, too.

use super::memory_budget::{MemoryBudget, MemoryShare};
use brotli_decompressor::{BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc};
use flate2::{Decompress, FlushDecompress, Status};
use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::Read;

/// Why a body cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// Another coding, several of them, or invalid data.
    Unreadable,
    /// The body expands too much, or needs too much memory, by itself or beside the bodies of other connections.
    TooLarge,
    /// All decoders together hold as much memory as they may.
    NoMemory,
}

/// What all decoders of the process may hold.
static MEMORY: MemoryBudget = MemoryBudget::new(256 << 20);

/// A body may expand to so many bytes, and in addition by [`RATIO_MAX`] for each byte that arrives.
const DECODED_FREE_BYTES: u64 = 4 << 20;
/// Event streams are repetitive: identical chunks of a token expand by a factor of about 100.
const RATIO_MAX: u64 = 256;
/// Largest window of zstd: RFC 9659 allows no larger one.
const ZSTD_WINDOW_MAX_BYTES: u64 = 8 << 20;
/// Largest window of Brotli, as a power of two: the default of the encoders. Larger ones are for large files.
const BROTLI_WINDOW_MAX_BITS: u8 = 22;
const BUFFER_BYTES: usize = 8192;
/// What a decoder holds besides its window: state and tables, and the compressed block of zstd.
const STATE_BYTES: usize = 256 << 10;
const INFLATE_BYTES: usize = 64 << 10;

/// Decoder of one body.
pub struct ContentDecoder {
    coding: Coding,
    memory: MemoryShare,
    encoded_bytes: u64,
    decoded_bytes: u64,
}

enum Coding {
    Identity,
    Gzip(Inflate),
    /// Zlib format, or raw data, as some servers send.
    Deflate(Option<Inflate>),
    Brotli(Box<Brotli>),
    Zstd(Box<Zstd>),
    Failed(DecodeError),
}

struct Inflate {
    decompress: Decompress,
    format: InflateFormat,
    has_ended: bool,
    /// Bytes follow the end.
    has_excess: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum InflateFormat {
    /// Further members may follow the first one.
    Gzip,
    Zlib,
    Raw,
}

#[derive(Default)]
struct Brotli {
    /// `None` before the first byte.
    state: Option<BrotliState<StandardAlloc, StandardAlloc, StandardAlloc>>,
    has_ended: bool,
    /// Bytes follow the end.
    has_excess: bool,
}

struct Zstd {
    decoder: FrameDecoder,
    /// Compressed data up to the end of a header or block.
    pending: Vec<u8>,
    part: ZstdPart,
    /// A frame has ended.
    has_ended: bool,
}

/// What comes next in a zstd frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ZstdPart {
    Header,
    Block {
        /// Whether a checksum follows the last block.
        has_checksum: bool,
    },
    /// So many bytes of a frame that is skipped.
    Skipped(u32),
}

/// Whether a value of Content-Encoding, or all of its lines, stands for no coding.
pub fn is_identity(content_encoding: &[u8]) -> bool {
    let name = content_encoding.trim_ascii();
    name.is_empty() || name.eq_ignore_ascii_case(b"identity")
}

/// Receives decoded bytes; fails when there are too many.
type Output<'a> = dyn FnMut(&[u8]) -> Result<(), DecodeError> + 'a;

impl ContentDecoder {
    /// The decoder of a value of Content-Encoding, or of all of its lines.
    pub fn new(content_encoding: Option<&[u8]>) -> ContentDecoder {
        ContentDecoder::within(&MEMORY, content_encoding)
    }

    pub(crate) fn within(budget: &'static MemoryBudget, content_encoding: Option<&[u8]>) -> ContentDecoder {
        let name = content_encoding.unwrap_or_default().trim_ascii().to_ascii_lowercase();
        let coding = match &name[..] {
            name if is_identity(name) => Coding::Identity,
            b"gzip" | b"x-gzip" => Coding::Gzip(Inflate::new(InflateFormat::Gzip)),
            b"deflate" => Coding::Deflate(None),
            b"br" => Coding::Brotli(Box::default()),
            b"zstd" => {
                let mut decoder = FrameDecoder::new();
                decoder.set_max_window_size(ZSTD_WINDOW_MAX_BYTES);
                Coding::Zstd(Box::new(Zstd { decoder, pending: Vec::new(), part: ZstdPart::Header, has_ended: false }))
            }
            _ => Coding::Failed(DecodeError::Unreadable),
        };
        ContentDecoder { coding, memory: budget.share(), encoded_bytes: 0, decoded_bytes: 0 }
    }

    /// Decodes `bytes`, and passes the result to `output` in pieces. After an error nothing more is decoded.
    pub fn push(&mut self, bytes: &[u8], output: &mut impl FnMut(&[u8])) {
        self.encoded_bytes += bytes.len() as u64;
        let decoded_max = DECODED_FREE_BYTES.saturating_add(self.encoded_bytes.saturating_mul(RATIO_MAX));
        let (state_bytes, window_max) = self.coding.memory();
        let (decoded_bytes, memory) = (&mut self.decoded_bytes, &mut self.memory);
        let mut bounded = |piece: &[u8]| {
            *decoded_bytes += piece.len() as u64;
            output(piece);
            // Pages of a window that nothing was written to take no memory.
            let window_bytes = (*decoded_bytes).min(window_max) as usize;
            match *decoded_bytes <= decoded_max {
                false => Err(DecodeError::TooLarge),
                true if memory.grow_to(state_bytes + window_bytes) => Ok(()),
                true => Err(DecodeError::NoMemory),
            }
        };
        let result = match &mut self.coding {
            Coding::Identity => {
                self.decoded_bytes += bytes.len() as u64;
                return output(bytes);
            }
            Coding::Gzip(inflate) => inflate.push(bytes, &mut bounded),
            Coding::Deflate(inflate) => {
                let Some(first) = bytes.first() else { return };
                // The first byte of the zlib format has the method in its lower half, and at most 7 in its upper half. Raw data
                // begin so only with a stored block whose padding is not zero.
                let format = if first & 0x8F == 8 { InflateFormat::Zlib } else { InflateFormat::Raw };
                inflate.get_or_insert_with(|| Inflate::new(format)).push(bytes, &mut bounded)
            }
            Coding::Brotli(brotli) => brotli.push(bytes, &mut bounded),
            Coding::Zstd(zstd) => zstd.push(bytes, &mut bounded),
            Coding::Failed(_) => return,
        };
        if let Err(error) = result {
            self.coding = Coding::Failed(error);
            self.memory.clear();
        }
    }

    /// Whether bodies have no coding.
    pub fn is_identity(&self) -> bool {
        matches!(self.coding, Coding::Identity)
    }

    /// Whether the data ended where their coding says so, and are of the format that the name of the coding stands for: everyone
    /// who decodes them gets the same.
    pub fn is_exact(&self) -> bool {
        match &self.coding {
            Coding::Identity => true,
            Coding::Gzip(inflate) | Coding::Deflate(Some(inflate)) => {
                inflate.has_ended && !inflate.has_excess && inflate.format != InflateFormat::Raw
            }
            Coding::Brotli(brotli) => brotli.has_ended && !brotli.has_excess,
            Coding::Zstd(zstd) => zstd.has_ended && zstd.part == ZstdPart::Header && zstd.pending.is_empty(),
            Coding::Deflate(None) | Coding::Failed(_) => false,
        }
    }

    pub fn decoded_bytes(&self) -> u64 {
        self.decoded_bytes
    }

    pub fn error(&self) -> Option<DecodeError> {
        if let Coding::Failed(error) = self.coding { Some(error) } else { None }
    }
}

impl Coding {
    /// The memory of the decoder without its window, and the bytes of its window at most.
    fn memory(&self) -> (usize, u64) {
        match self {
            Coding::Identity | Coding::Failed(_) => (0, 0),
            Coding::Gzip(_) | Coding::Deflate(_) => (INFLATE_BYTES, 0),
            Coding::Brotli(_) => (STATE_BYTES, 1 << BROTLI_WINDOW_MAX_BITS),
            Coding::Zstd(_) => (STATE_BYTES, ZSTD_WINDOW_MAX_BYTES),
        }
    }
}

impl Inflate {
    fn new(format: InflateFormat) -> Inflate {
        let decompress = match format {
            InflateFormat::Gzip => Decompress::new_gzip(15),
            InflateFormat::Zlib => Decompress::new(true),
            InflateFormat::Raw => Decompress::new(false),
        };
        Inflate { decompress, format, has_ended: false, has_excess: false }
    }

    fn push(&mut self, mut bytes: &[u8], output: &mut Output<'_>) -> Result<(), DecodeError> {
        let mut buffer = [0; BUFFER_BYTES];
        loop {
            if self.has_ended {
                if self.format != InflateFormat::Gzip || bytes.is_empty() {
                    self.has_excess |= !bytes.is_empty();
                    return Ok(());
                }
                self.decompress.reset(true);
            }
            let (before_in, before_out) = (self.decompress.total_in(), self.decompress.total_out());
            let status = self.decompress.decompress(bytes, &mut buffer, FlushDecompress::None);
            let status = status.map_err(|_invalid| DecodeError::Unreadable)?;
            bytes = &bytes[(self.decompress.total_in() - before_in) as usize..];
            let decoded = (self.decompress.total_out() - before_out) as usize;
            output(&buffer[..decoded])?;
            self.has_ended = status == Status::StreamEnd;
            let is_full = decoded == buffer.len();
            if !self.has_ended && (status == Status::BufError || (bytes.is_empty() && !is_full)) {
                return Ok(());
            }
        }
    }
}

impl Brotli {
    fn push(&mut self, bytes: &[u8], output: &mut Output<'_>) -> Result<(), DecodeError> {
        self.has_excess |= self.has_ended && !bytes.is_empty();
        let Some(first) = bytes.first().filter(|_| !self.has_ended) else { return Ok(()) };
        if self.state.is_none() && first & 1 == 1 && 17 + (first >> 1 & 7) > BROTLI_WINDOW_MAX_BITS {
            return Err(DecodeError::TooLarge);
        }
        let state = self.state.get_or_insert_with(|| {
            BrotliState::new_strict(StandardAlloc::default(), StandardAlloc::default(), StandardAlloc::default())
        });
        let mut buffer = [0; BUFFER_BYTES];
        let (mut left, mut at, mut total) = (bytes.len(), 0, 0);
        loop {
            let (mut room, mut decoded) = (buffer.len(), 0);
            let result = BrotliDecompressStream(
                &mut left,
                &mut at,
                bytes,
                &mut room,
                &mut decoded,
                &mut buffer,
                &mut total,
                state,
            );
            output(&buffer[..decoded])?;
            match result {
                BrotliResult::NeedsMoreOutput => {}
                BrotliResult::NeedsMoreInput => return Ok(()),
                BrotliResult::ResultSuccess => {
                    self.has_ended = true;
                    self.has_excess = left > 0;
                    return Ok(());
                }
                BrotliResult::ResultFailure => return Err(DecodeError::Unreadable),
            }
        }
    }
}

/// Bytes of the magic number of a frame, and of its descriptor.
const ZSTD_DESCRIPTOR_AT: usize = 4;
const ZSTD_BLOCK_HEADER_BYTES: usize = 3;
const ZSTD_BLOCK_MAX_BYTES: usize = 128 << 10;
const ZSTD_CHECKSUM_BYTES: usize = 4;

impl Zstd {
    fn push(&mut self, bytes: &[u8], output: &mut Output<'_>) -> Result<(), DecodeError> {
        let mut rest = bytes;
        loop {
            if let ZstdPart::Skipped(left) = self.part {
                let skipped = rest.len().min(left as usize);
                rest = &rest[skipped..];
                self.part = ZstdPart::Skipped(left - skipped as u32);
                if skipped == left as usize {
                    self.part = ZstdPart::Header;
                } else {
                    return Ok(());
                }
            }
            // The length of a part is known once its first bytes are here.
            let needed = self.needed()?;
            let missing = needed.saturating_sub(self.pending.len());
            let (taken, after) = rest.split_at(missing.min(rest.len()));
            self.pending.extend_from_slice(taken);
            rest = after;
            if self.pending.len() < needed {
                return Ok(());
            }
            if self.needed()? == needed {
                self.decode_part(output)?;
                self.pending.clear();
            }
        }
    }

    /// Bytes of the part at hand, as far as its first bytes say.
    fn needed(&self) -> Result<usize, DecodeError> {
        match self.part {
            ZstdPart::Block { has_checksum } => {
                let Some(header) = self.pending.first_chunk::<ZSTD_BLOCK_HEADER_BYTES>() else {
                    return Ok(ZSTD_BLOCK_HEADER_BYTES);
                };
                let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
                let (is_last, is_repeated, size) = (header & 1 == 1, header >> 1 & 3 == 1, (header >> 3) as usize);
                let content = if is_repeated { 1 } else { size };
                let checksum = if is_last && has_checksum { ZSTD_CHECKSUM_BYTES } else { 0 };
                match size <= ZSTD_BLOCK_MAX_BYTES {
                    true => Ok(ZSTD_BLOCK_HEADER_BYTES + content + checksum),
                    false => Err(DecodeError::Unreadable),
                }
            }
            _ => match self.pending.get(..=ZSTD_DESCRIPTOR_AT) {
                None => Ok(ZSTD_DESCRIPTOR_AT + 1),
                Some([0x50..=0x5F, 0x2A, 0x4D, 0x18, ..]) => Ok(8),
                Some(head) => {
                    let descriptor = head[ZSTD_DESCRIPTOR_AT];
                    let is_single_segment = descriptor >> 5 & 1 == 1;
                    let window = usize::from(!is_single_segment);
                    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
                    let size = [usize::from(is_single_segment), 2, 4, 8][usize::from(descriptor >> 6)];
                    Ok(ZSTD_DESCRIPTOR_AT + 1 + window + dictionary + size)
                }
            },
        }
    }

    fn decode_part(&mut self, output: &mut Output<'_>) -> Result<(), DecodeError> {
        let mut part = &self.pending[..];
        if self.part == ZstdPart::Header {
            if part[1..4] == [0x2A, 0x4D, 0x18] {
                let length = [4, 5, 6, 7].map(|at| part[at]);
                self.part = ZstdPart::Skipped(u32::from_le_bytes(length));
                return Ok(());
            }
            self.part = ZstdPart::Block { has_checksum: part[ZSTD_DESCRIPTOR_AT] >> 2 & 1 == 1 };
            return self.decoder.reset(&mut part).map_err(|error| match error {
                FrameDecoderError::WindowSizeTooBig { .. } => DecodeError::TooLarge,
                _ => DecodeError::Unreadable,
            });
        }
        let one = BlockDecodingStrategy::UptoBlocks(1);
        let is_finished = self.decoder.decode_blocks(&mut part, one).map_err(|_invalid| DecodeError::Unreadable)?;
        if is_finished {
            self.part = ZstdPart::Header;
            self.has_ended = true;
        }
        let mut buffer = [0; BUFFER_BYTES];
        while self.decoder.can_collect() > 0 {
            let decoded = self.decoder.read(&mut buffer).map_err(|_invalid| DecodeError::Unreadable)?;
            output(&buffer[..decoded])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use std::io::Write;

    const JSON: &[u8] = br#"{"id":"x","usage":{"total_tokens":12345}}"#;
    /// `JSON` with windows of 2^22 and 2^24 bytes, and 16 MiB of spaces.
    const BROTLI: &str = "0b14807b226964223a2278222c227573616765223a7b22746f74616c5f746f6b656e73223a31323334357d7d03";
    const BROTLI_LARGE_WINDOW: &str =
        "0f14807b226964223a2278222c227573616765223a7b22746f74616c5f746f6b656e73223a31323334357d7d03";
    const BROTLI_BOMB: &str = "cbffff3ff82540e2b14020f7fe2ffffffff04b00c4611180eefd1f";

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(data: &[u8]) -> Vec<u8> {
        compress_to_vec(data, CompressionLevel::Fastest)
    }

    /// What a body decodes to, in pieces of a size, with the largest piece of output.
    fn decode(coding: &str, body: &[u8], size: usize) -> Result<Vec<u8>, DecodeError> {
        let (mut decoder, mut decoded) = (ContentDecoder::new(Some(coding.as_bytes())), Vec::new());
        for piece in body.chunks(size) {
            decoder.push(piece, &mut |data: &[u8]| {
                assert!(coding == "identity" || data.len() <= BUFFER_BYTES);
                decoded.extend_from_slice(data);
            });
        }
        decoder.error().map_or(Ok(decoded), Err)
    }

    #[test]
    fn all_codings_are_decoded_in_pieces_of_any_size() {
        let text: Vec<u8> =
            (0..20_000_u32).flat_map(|n| format!("data: {{\"n\":{}}}\n\n", n * 7919 % 1000).into_bytes()).collect();
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
        zlib.write_all(&text).unwrap();
        let mut raw = DeflateEncoder::new(Vec::new(), Compression::fast());
        raw.write_all(&text).unwrap();
        let (first, second) = text.split_at(1234);
        let skipped = [0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 1, 2, 3];
        let bodies = [
            ("identity", text.clone()),
            ("GZIP", gzip(&text)),
            ("x-gzip", [gzip(first), gzip(second)].concat()),
            ("deflate", zlib.finish().unwrap()),
            ("deflate", raw.finish().unwrap()),
            ("zstd", zstd(&text)),
            (" zstd ", [zstd(first), skipped.to_vec(), zstd(second)].concat()),
        ];
        for (coding, body) in &bodies {
            for size in [1, 2, 3, 1000, body.len()] {
                assert!(decode(coding, body, size).as_ref() == Ok(&text), "{coding} in pieces of {size}");
            }
        }
        for size in 1..=9 {
            assert_eq!(decode("br", &bytes(BROTLI), size).unwrap(), JSON);
        }
        assert_eq!(decode("zstd", &zstd(b""), 1), Ok(Vec::new()));
    }

    #[test]
    fn bombs_and_large_windows_are_too_large() {
        let spaces = vec![b' '; 32 << 20];
        // A block of zstd that repeats one byte 128 Ki times, 200 times; without a last block.
        let repeated = [vec![0x28, 0xB5, 0x2F, 0xFD, 0, 0x58], [2, 0, 0x10, b' '].repeat(200)].concat();
        let large_window = [0x28, 0xB5, 0x2F, 0xFD, 0, 0x70, 1, 0, 0];
        for (coding, body) in [
            ("gzip", gzip(&spaces)),
            ("br", bytes(BROTLI_BOMB)),
            ("zstd", repeated),
            ("zstd", large_window.to_vec()),
            ("br", bytes(BROTLI_LARGE_WINDOW)),
        ] {
            for size in [7, 1 << 20] {
                assert_eq!(decode(coding, &body, size).map(|data| data.len()), Err(DecodeError::TooLarge), "{coding}");
            }
        }
        assert!(decode("gzip", &gzip(&spaces[..4 << 20]), 100).is_ok());
    }

    #[test]
    fn decoders_share_one_budget() {
        static BUDGET: MemoryBudget = MemoryBudget::new(STATE_BYTES + INFLATE_BYTES + 50_000);
        let mut decoders =
            ["br", "gzip", "gzip"].map(|coding| ContentDecoder::within(&BUDGET, Some(coding.as_bytes())));
        decoders[0].push(&bytes(BROTLI), &mut |_: &[u8]| ());
        decoders[1].push(&gzip(JSON), &mut |_: &[u8]| ());
        decoders[2].push(&gzip(JSON), &mut |_: &[u8]| ());
        assert_eq!(decoders.each_ref().map(ContentDecoder::error), [None, None, Some(DecodeError::NoMemory)]);
        drop(decoders);
        // The window counts as far as it is filled.
        let mut decoder = ContentDecoder::within(&BUDGET, Some(b"br"));
        decoder.push(&bytes(BROTLI_BOMB), &mut |_: &[u8]| ());
        assert_eq!(decoder.error(), Some(DecodeError::NoMemory));
        assert!(decoder.decoded_bytes() < 200_000 && BUDGET.share().grow_to(STATE_BYTES + INFLATE_BYTES + 50_000));
    }

    #[test]
    fn other_codings_and_invalid_data_are_unreadable() {
        let mut broken = gzip(JSON);
        broken[15] ^= 0xFF;
        for (coding, body) in [
            ("gzip, br", JSON),
            ("compress", JSON),
            ("gzip", JSON),
            ("gzip", &broken),
            ("br", b"\x91"),
            ("zstd", JSON),
            ("deflate", b"\xFF\xFF"),
            ("zstd", &[0x28, 0xB5, 0x2F, 0xFD, 0x20, 1, 0xFF, 0xFF, 0xFF]),
        ] {
            assert_eq!(decode(coding, body, 1), Err(DecodeError::Unreadable), "{coding}");
        }
    }
}
