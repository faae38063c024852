//! An issuer of tokens: keys of every type, made for the test, and tokens signed with them.
//!
//! Tokens are assembled by hand, so that every part can be malformed.

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256};
use aws_lc_rs::{digest, hmac};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::TempDir;

pub struct Issuer {
    pub secret: String,
    rsa: RsaKeyPair,
    ec: EcdsaKeyPair,
    ed: Ed25519KeyPair,
}

pub const ALGORITHMS: [&str; 4] = ["HS256", "RS256", "ES256", "EdDSA"];

impl Issuer {
    /// A new issuer with its own keys.
    pub fn new() -> Issuer {
        let ed = Ed25519KeyPair::generate().unwrap();
        Issuer {
            secret: encode(digest::digest(&digest::SHA256, ed.public_key().as_ref())),
            rsa: RsaKeyPair::generate(KeySize::Rsa2048).unwrap(),
            ec: EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap(),
            ed,
        }
    }

    /// A genuine token with these claims.
    pub fn token(&self, algorithm: &str, claims: &Value) -> String {
        self.sign(algorithm, &json!({ "alg": algorithm, "typ": "JWT" }), claims)
    }

    /// A token with any header, signed with the key for an algorithm.
    pub fn sign(&self, algorithm: &str, header: &Value, claims: &Value) -> String {
        let signed = format!("{}.{}", encode(header.to_string()), encode(claims.to_string()));
        let message = signed.as_bytes();
        let signature = match algorithm {
            "HS256" => hmac_sha256(self.secret.as_bytes(), message),
            "RS256" => {
                let mut signature = vec![0; self.rsa.public_modulus_len()];
                self.rsa.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature).unwrap();
                signature
            }
            "ES256" => self.ec.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec(),
            "EdDSA" => self.ed.sign(message).as_ref().to_vec(),
            _ => panic!("{algorithm}"),
        };
        format!("{signed}.{}", encode(signature))
    }

    /// The public key for an algorithm, in PEM.
    pub fn pem(&self, algorithm: &str) -> String {
        let der: PublicKeyX509Der = match algorithm {
            "RS256" => self.rsa.public_key().as_der(),
            "ES256" => self.ec.public_key().as_der(),
            "EdDSA" => self.ed.public_key().as_der(),
            _ => panic!("{algorithm}"),
        }
        .unwrap();
        let lines: Vec<String> = STANDARD.encode(der.as_ref()).as_bytes().chunks(64).map(line).collect();
        format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", lines.join("\n"))
    }

    /// `keys` of `[jwt]`, with the keys in files.
    pub fn keys(&self, scratch: &TempDir) -> String {
        let keys = ALGORITHMS.map(|algorithm| {
            let (setting, text) = match algorithm {
                "HS256" => ("secret_file", format!("{}\n", self.secret)),
                _ => ("public_key_file", self.pem(algorithm)),
            };
            let file = scratch.write(&format!("{algorithm}.key"), text);
            format!("{{ algorithm = \"{algorithm}\", {setting} = \"{}\" }}", file.display())
        });
        format!("[jwt]\nkeys = [{}]\n", keys.join(", "))
    }

    /// A set of the public keys, each with its algorithm as its id.
    pub fn jwks(&self) -> Value {
        // A DER sequence of two integers: the modulus, with a zero before it, and 65537.
        let rsa = self.rsa.public_key().as_ref();
        let (modulus, exponent) = (&rsa[9..9 + 256], &rsa[rsa.len() - 3..]);
        let (x, y) = self.ec.public_key().as_ref()[1..].split_at(32);
        json!({ "keys": [
            { "kty": "oct", "kid": "HS256", "alg": "HS256", "k": encode(&self.secret) },
            { "kty": "RSA", "kid": "RS256", "use": "sig", "n": encode(modulus), "e": encode(exponent) },
            { "kty": "EC", "kid": "ES256", "crv": "P-256", "x": encode(x), "y": encode(y) },
            { "kty": "OKP", "kid": "EdDSA", "crv": "Ed25519", "x": encode(self.ed.public_key()) },
        ]})
    }
}

/// The HS256 signature with any secret.
pub fn hmac_sha256(secret: &[u8], message: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
}

pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn line(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}
