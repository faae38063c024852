//! The format and the coding in which a scraper wants the metrics (RFC 9110, sections 12.5.1 and 12.5.3).

use http::HeaderMap;
use http::header::{ACCEPT, ACCEPT_ENCODING, HeaderName};

use transom_runtime::metrics::exposition::Format;

/// How precisely an element of `Accept` names a media type; the most precise element applies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Precision {
    Anything,
    Type,
    Subtype,
    Version,
}

/// A format as elements of `Accept` name it.
struct MediaType {
    main: &'static str,
    sub: &'static str,
    version: &'static str,
}

const PROMETHEUS: MediaType = MediaType { main: "text", sub: "plain", version: "0.0.4" };
const OPEN_METRICS: MediaType = MediaType { main: "application", sub: "openmetrics-text", version: "1.0.0" };

/// OpenMetrics if the client prefers it, or names it without a preference. A client that accepts neither gets the other format.
pub fn format(fields: &HeaderMap) -> Format {
    let (prometheus, open_metrics) = (PROMETHEUS.quality(fields), OPEN_METRICS.quality(fields));
    let is_named = open_metrics.1 >= Precision::Subtype;
    let is_preferred = open_metrics.0 > prometheus.0 || (is_named && open_metrics.0 == prometheus.0);
    if open_metrics.0 > 0 && is_preferred { Format::OpenMetrics } else { Format::Prometheus }
}

/// Whether the client accepts gzip, and does not prefer no coding.
pub fn gzip(fields: &HeaderMap) -> bool {
    let quality = |names: &[&str]| {
        let named = elements(fields, &ACCEPT_ENCODING).filter(|element| names.contains(&&*element.name));
        named.map(|element| element.quality).max()
    };
    let gzip = quality(&["gzip", "x-gzip"]).or_else(|| quality(&["*"])).unwrap_or(0);
    gzip > 0 && gzip >= quality(&["identity"]).unwrap_or(0)
}

impl MediaType {
    /// The quality that the client gives the type, in thousandths, and how precisely it names it.
    fn quality(&self, fields: &HeaderMap) -> (u16, Precision) {
        if !fields.contains_key(ACCEPT) {
            return (1000, Precision::Anything);
        }
        let of_element = |element: Element| Some((self.precision(&element)?, element.quality));
        let best = elements(fields, &ACCEPT).filter_map(of_element).max();
        best.map_or((0, Precision::Anything), |(precision, quality)| (quality, precision))
    }

    /// `None`: the element does not include the type.
    fn precision(&self, element: &Element) -> Option<Precision> {
        match (element.name.split_once('/')?, &element.version) {
            (("*", "*"), _) => Some(Precision::Anything),
            ((main, "*"), _) if main == self.main => Some(Precision::Type),
            ((main, sub), None) if (main, sub) == (self.main, self.sub) => Some(Precision::Subtype),
            ((main, sub), Some(version)) if (main, sub, &**version) == (self.main, self.sub, self.version) => {
                Some(Precision::Version)
            }
            _ => None,
        }
    }
}

/// One element of a list with qualities.
struct Element {
    /// In lower case.
    name: String,
    version: Option<String>,
    /// In thousandths.
    quality: u16,
}

/// The elements of all lines of a field. Malformed ones are skipped.
fn elements<'f>(fields: &'f HeaderMap, name: &HeaderName) -> impl Iterator<Item = Element> + use<'f> {
    let lines = fields.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).filter_map(|element| {
        let mut parts = element.split(';').map(str::trim);
        let name = parts.next()?.to_ascii_lowercase();
        let (mut version, mut quality) = (None, 1000);
        for (key, value) in parts.filter_map(|part| part.split_once('=')) {
            match key.trim().to_ascii_lowercase().as_str() {
                "version" => version = Some(value.trim().trim_matches('"').to_owned()),
                "q" => quality = parse_quality(value.trim())?,
                _ => {}
            }
        }
        (!name.is_empty()).then_some(Element { name, version, quality })
    })
}

/// A number from 0 to 1 with at most three decimals, in thousandths.
fn parse_quality(text: &str) -> Option<u16> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let is_number = decimals.len() <= 3 && decimals.bytes().all(|digit| digit.is_ascii_digit());
    let thousandths = format!("{decimals:0<3}").parse().ok().filter(|_| is_number)?;
    match (whole, thousandths) {
        ("0", thousandths) => Some(thousandths),
        ("1", 0) => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn fields(name: HeaderName, lines: &[&'static str]) -> HeaderMap {
        lines.iter().map(|line| (name.clone(), HeaderValue::from_static(line))).collect()
    }

    #[test]
    fn openmetrics_is_chosen_where_it_is_preferred() {
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
             application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
             text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accepted in [
            &[prometheus_3][..],
            &["application/openmetrics-text; version=1.0.0"],
            &["Application/OpenMetrics-Text"],
            &["application/openmetrics-text;version=\"1.0.0\";q=0.5 , text/plain;q=0.4"],
            &["application/openmetrics-text, text/plain"],
            &["text/plain;q=0.1", "application/openmetrics-text;q=0.2"],
            &["*/*, application/openmetrics-text"],
            &["application/*"],
            &["text/*;q=0.5, */*;q=0.6"],
        ] {
            assert_eq!(format(&fields(ACCEPT, accepted)), Format::OpenMetrics, "{accepted:?}");
        }
        for accepted in [
            &[][..],
            &["*/*"],
            &[""],
            &["text/html, application/xhtml+xml, application/xml;q=0.9, */*;q=0.8"],
            &["text/plain;version=0.0.4"],
            &["application/openmetrics-text; version=0.0.1"],
            &["application/openmetrics-text; version=2.0.0, */*;q=0.1"],
            &["application/openmetrics-text;q=0"],
            &["application/openmetrics-text;q=0, */*"],
            &["application/openmetrics-text;q=0.4, text/plain;q=0.5"],
            &["application/openmetrics-text;q=0.4, text/*;q=0.5"],
            // The precise element applies to OpenMetrics, the others to the text format.
            &["application/openmetrics-text;q=0.3, */*;q=0.9"],
            // Not numbers from 0 to 1.
            &["application/openmetrics-text;q=2"],
            &["application/openmetrics-text;q=0.1234"],
            &["application/openmetrics-text;q=-1"],
            &["application/openmetrics-text;q="],
            &["image/png"],
            &[";;;,,,=;q=1,/;version"],
        ] {
            assert_eq!(format(&fields(ACCEPT, accepted)), Format::Prometheus, "{accepted:?}");
        }
    }

    #[test]
    fn gzip_is_used_where_it_is_accepted() {
        for accepted in [
            &["gzip"][..],
            &["deflate, GZIP;q=0.5, br, zstd"],
            &["x-gzip"],
            &["*"],
            &["identity;q=0.5", "gzip;q=0.5"],
            &["gzip;q=1.000"],
        ] {
            assert!(gzip(&fields(ACCEPT_ENCODING, accepted)), "{accepted:?}");
        }
        for accepted in [
            &[][..],
            &[""],
            &["identity"],
            &["br"],
            &["gzip;q=0"],
            &["gzip;q=0.000, *"],
            &["*;q=0"],
            &["gzip;q=0.5, identity"],
            &["gzip;q=1.1"],
            &["gzip2"],
        ] {
            assert!(!gzip(&fields(ACCEPT_ENCODING, accepted)), "{accepted:?}");
        }
    }
}
