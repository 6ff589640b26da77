package keys

import "strings"

// Slots is the number of hash slots of a Redis Cluster.
const Slots = 16384

// Slot returns the cluster slot of a key: the CRC16 (XMODEM) of its hash tag, or of all of it if it has none. See the
// Redis Cluster specification, "Hash tags".
func Slot(key string) int {
	if t := tag(key); t != "" {
		key = t
	}
	var crc uint16
	for i := range len(key) {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^key[i]]
	}
	return int(crc % Slots)
}

// tag returns what stands between the first opening brace and the next closing one; empty if that is nothing, or if
// one of them is missing.
func tag(key string) string {
	_, rest, found := strings.Cut(key, "{")
	if !found {
		return ""
	}
	t, _, found := strings.Cut(rest, "}")
	if !found {
		return ""
	}
	return t
}

// crcTable has the CRC16 of each byte for the polynomial x^16 + x^12 + x^5 + 1.
var crcTable = func() (table [256]uint16) {
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		table[i] = crc
	}
	return table
}()
